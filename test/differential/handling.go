// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/netfilter"
	"github.com/tandem-proxy/tandem/test/oracle"
)

// result is one of the things that can happen to a packet.
type result struct {
	verdict    netfilter.Verdict
	to         netip.AddrPort // of an accepted packet
	masquerade bool
}

func (r result) String() string {
	if r.verdict != netfilter.Accept {
		return r.verdict.String()
	}
	if r.masquerade {
		return r.to.String() + " masqueraded"
	}
	return r.to.String()
}

// handling are all of them, with their probabilities.
type handling map[result]float64

func (h handling) equal(o handling) bool {
	if len(h) != len(o) {
		return false
	}
	for r, share := range h {
		if math.Abs(share-o[r]) > 1e-6 { // the kernel's numbers have 31 bits
			return false
		}
	}
	return true
}

// only reports whether a verdict is certain.
func (h handling) only(v netfilter.Verdict) bool {
	for r := range h {
		if r.verdict != v {
			return false
		}
	}
	return true
}

// passes reports whether the packet goes where it was sent, with its source.
func (h handling) passes(to netip.AddrPort) bool {
	_, ok := h[result{to: to}]
	return ok && len(h) == 1
}

func (h handling) String() string {
	var list []result
	for r := range h {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b result) int {
		return cmp.Or(cmp.Compare(a.verdict, b.verdict), a.to.Compare(b.to), cmp.Compare(a.String(), b.String()))
	})
	var texts []string
	for _, r := range list {
		texts = append(texts, fmt.Sprintf("%s (%.4f)", r, h[r]))
	}
	return strings.Join(texts, ", ")
}

func handlingOf(branches []netfilter.Branch) handling {
	h := handling{}
	for _, b := range branches {
		r := result{verdict: b.Verdict}
		if b.Verdict == netfilter.Accept {
			r.to, r.masquerade = b.To, b.Masqueraded
		}
		h[r] += b.Probability
	}
	return h
}

// expected is what rules have to do by an answer.
func expected(p *netfilter.Packet, want *oracle.Answer) handling {
	switch want.Outcome {
	case proxier.Rejected:
		return handling{{verdict: netfilter.Reject}: 1}
	case proxier.Dropped:
		return handling{{verdict: netfilter.Drop}: 1}
	case proxier.Pass:
		return handling{{to: p.Dst}: 1}
	}
	h := handling{}
	for _, to := range want.Backends {
		hidden := want.Source.HidesClient() || p.Src.Addr() == to.Addr()
		// What comes in and stays needs no other source: its replies are sent from here.
		stays := p.In != "" && p.Local(to.Addr())
		h[result{to: to, masquerade: hidden && !stays}] += 1 / float64(len(want.Backends))
	}
	return h
}

// describe formats what can happen to a packet, with the rules that matched.
func describe(branches []netfilter.Branch) string {
	var texts []string
	for _, b := range branches {
		texts = append(texts, fmt.Sprintf("%.9f %s", b.Probability, b.Result))
	}
	return strings.Join(texts, "\n")
}
