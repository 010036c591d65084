// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hostfilter

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/nftables"
)

// Firewall drops or rejects forwarded packets that begin a connection, unless it knows the connection
// as a translated one, or kube-proxy's rules admit it by their mark.
type Firewall struct {
	// Not are the families that it is not about.
	Not [inet.Families]bool
	// Accepts are destinations that it forwards in any case.
	Accepts []netip.Prefix
	// Where it is, for people.
	Where string
}

func (f Firewall) String() string {
	if f.Accepts == nil {
		return f.Where
	}
	return fmt.Sprintf("%s (accepts packets to %v)", f.Where, f.Accepts)
}

func (f *Firewall) equal(o Firewall) bool {
	return f.Not == o.Not && f.Where == o.Where && slices.Equal(f.Accepts, o.Accepts)
}

// firewall follows a base chain of hook forward. Where byStatus is set, it counts only if it admits
// connections by their status: otherwise it drops translated ones as well.
func (w *walk) firewall(chain string, within inet.Match, drops, byStatus bool, where string) (f Firewall, is bool) {
	var fate fate
	switch w.fate(chain, within, &fate) {
	case nftables.Drop:
		drops = true
	case nftables.Accept:
		drops = false
	}
	// Rules that were not followed count as dropping.
	drops = drops || fate.incomplete
	f = Firewall{Not: within.Not, Accepts: fate.accepts, Where: where}
	slices.SortFunc(f.Accepts, netip.Prefix.Compare)
	f.Accepts = slices.Compact(f.Accepts)
	return f, drops && (fate.status || fate.incomplete || !byStatus)
}

// fate is what was learnt on the way through chains.
type fate struct {
	accepts []netip.Prefix
	status  bool // a rule goes by the status of connections
	// incomplete means that there are too many rules to follow.
	incomplete bool
}

// fate says what a chain does with packets that no rule knows: Continue if nothing. Rules that
// match some packets are skipped, but for those that accept destinations. Chains of kube-proxy are
// skipped: they admit what it has translated.
func (w *walk) fate(chain string, within inet.Match, f *fate) nftables.Verdict {
	if w.depth++; w.depth > maxDepth {
		w.depth--
		return nftables.Continue
	}
	defer func() { w.depth-- }()
	rules := w.rules(chain)
	for i := range rules {
		s := &rules[i]
		if w.steps++; w.steps > maxSteps {
			f.incomplete = true
			return nftables.Continue
		}
		if strings.HasPrefix(s.Target, "KUBE-") {
			continue
		}
		f.status = f.status || s.Status
		m, some := within.And(s.Match)
		if !some || !s.Exact {
			// It may be a chain that knows connections by their status.
			if some && (s.Verdict == nftables.Jump || s.Verdict == nftables.Goto) && !f.status {
				var inner fate
				w.fate(s.Target, m, &inner)
				f.status, f.incomplete = inner.status, f.incomplete || inner.incomplete
			}
			continue
		}
		whole := m.String() == within.String()
		switch s.Verdict {
		case nftables.Drop, nftables.Accept, nftables.Return:
			switch {
			case whole && s.Verdict == nftables.Return:
				return nftables.Continue
			case whole:
				return s.Verdict
			case s.Verdict == nftables.Accept && m.Protocol == 0 && m.Ports == nil && m.Destinations != nil:
				f.accepts = append(f.accepts, m.Destinations...)
			}
		case nftables.Jump, nftables.Goto:
			verdict := w.fate(s.Target, m, f)
			if whole && (verdict != nftables.Continue || s.Verdict == nftables.Goto) {
				return verdict
			}
		}
	}
	return nftables.Continue
}
