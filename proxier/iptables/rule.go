// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// rule is a rule in parts. Its text is what iptables-save prints of it, so that texts
// can be compared with what is in the kernel.
type rule struct {
	source, dest string // "10.0.0.0/8", or "! 10.0.0.0/8"
	device       string // of packets that come in, negated as above
	protocol     proxier.Protocol
	comment      string
	matches      string // further ones
	port         string // the destination's, or a range first:last
	target       string // empty if the rule only counts
}

func (r rule) String() string {
	var b strings.Builder
	negatable := func(flag, value string) {
		if value == "" {
			return
		}
		if rest, negated := strings.CutPrefix(value, "! "); negated {
			b.WriteString("! ")
			value = rest
		}
		b.WriteString(flag)
		b.WriteByte(' ')
		b.WriteString(value)
		b.WriteByte(' ')
	}
	negatable("-s", r.source)
	negatable("-d", r.dest)
	negatable("-i", r.device)
	protocol := ""
	if r.protocol != 0 {
		protocol = protocolName(r.protocol)
		b.WriteString("-p " + protocol + " ")
	}
	if r.comment != "" {
		b.WriteString("-m comment --comment ")
		b.WriteString(quote(r.comment))
		b.WriteByte(' ')
	}
	if r.matches != "" {
		b.WriteString(r.matches)
		b.WriteByte(' ')
	}
	if protocol != "" {
		b.WriteString("-m " + protocol + " ")
		if r.port != "" {
			b.WriteString("--dport " + r.port + " ")
		}
	}
	if r.target != "" {
		b.WriteString("-j " + r.target)
	}
	return strings.TrimSuffix(b.String(), " ")
}

// maxComment is the longest comment in bytes, without the terminating one
// (XT_MAX_COMMENT_LEN).
const maxComment = 255

// quote writes a string as iptables-save does.
func quote(s string) string {
	s = s[:min(len(s), maxComment)]
	const plain = "_-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	if s != "" && strings.Trim(s, plain) == "" {
		return s
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `'`, `\'`).Replace(s) + `"`
}

func portText(port uint16) string { return strconv.Itoa(int(port)) }

// only is the prefix of one address.
func only(a netip.Addr) string { return netip.PrefixFrom(a, a.BitLen()).String() }

// probability matches so many packets of a number, on average. The kernel counts in units of 1/2³¹, and
// the tools print the rounded value.
func probability(some, of int) string {
	const one = 1 << 31
	parts := float64((int64(one)*2*int64(some)/int64(of) + 1) / 2) // rounded
	return fmt.Sprintf("-m statistic --mode random --probability %.11f", parts/one)
}

const (
	fromLocal = "-m addrtype --src-type LOCAL"
	toLocal   = "-m addrtype --dst-type LOCAL"
)
