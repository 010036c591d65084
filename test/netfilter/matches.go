// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// newMatch returns the match with that name, or nil.
func newMatch(name string, f proxier.Family) match {
	switch name {
	case "comment":
		return &comment{}
	case "tcp":
		return &ports{name: name, protocol: proxier.TCP}
	case "udp":
		return &ports{name: name, protocol: proxier.UDP}
	case "sctp":
		return &ports{name: name, protocol: proxier.SCTP}
	case "icmp":
		if f == proxier.IPv4 {
			return &icmp{name: "icmp", flag: "--icmp-type", protocol: ICMP, echo: 8, kind: unset}
		}
	case "icmp6", "icmpv6", "ipv6-icmp":
		if f == proxier.IPv6 {
			return &icmp{name: "icmp6", flag: "--icmpv6-type", protocol: ICMPv6, echo: 128, kind: unset}
		}
	case "mark":
		return &markMatch{}
	case "conntrack":
		return &ctstate{}
	case "addrtype":
		return &addrtype{}
	case "statistic":
		return &statistic{threshold: unset}
	case "recent":
		return &recent{name: "DEFAULT", mask: ones(f, hostBits[f]), family: f}
	case "nfacct":
		return &counter{}
	}
	return nil
}

// unset is a number that is not specified.
const unset = -1

// comment is -m comment, which always matches.
type comment struct {
	text  string
	given bool
}

// commentLength is the length to which the tools truncate a comment.
const commentLength = 255

func (c *comment) option(name string, not bool, w *words) (err error) {
	if name != "--comment" {
		return errNotMine
	}
	if c.text, err = w.value(name); len(c.text) > commentLength {
		err = fmt.Errorf("comment of %d bytes", len(c.text))
	}
	c.given = true
	return errors.Join(noNot(not), err)
}

func (c *comment) finish(*rule) error {
	if !c.given {
		return errors.New("comment without --comment")
	}
	return nil
}

func (c *comment) matches(*walk) bool { return true }
func (c *comment) String() string     { return "-m comment --comment " + quote(c.text) }

// ports matches the destination port of TCP, UDP or SCTP.
type ports struct {
	name     string
	protocol proxier.Protocol
	low      uint16
	high     uint16
	given    bool
	not      bool
}

func (p *ports) option(name string, not bool, w *words) error {
	if name != "--dport" {
		return errNotMine
	}
	value, err := w.value(name)
	if err != nil {
		return err
	}
	low, high, isRange := strings.Cut(value, ":")
	switch {
	case !isRange:
		high = low
	case low == "":
		low = "0"
	}
	if isRange && high == "" {
		high = "65535"
	}
	from, err1 := strconv.ParseUint(low, 10, 16)
	to, err2 := strconv.ParseUint(high, 10, 16)
	if err1 != nil || err2 != nil || from > to {
		return fmt.Errorf("port %q", value)
	}
	if not && from == 0 && to == math.MaxUint16 {
		return fmt.Errorf("! %s is never true", value)
	}
	p.low, p.high, p.given, p.not = uint16(from), uint16(to), true, not
	return nil
}

func (p *ports) finish(r *rule) error {
	if !r.protocol.exactly(p.protocol) {
		return fmt.Errorf("-m %s without -p %s", p.name, p.name)
	}
	return nil
}

func (p *ports) matches(w *walk) bool {
	if !p.given {
		return true
	}
	port := w.to.Port()
	return (p.low <= port && port <= p.high) != p.not
}

func (p *ports) String() string {
	// SCTP distinguishes a range of all ports from no range.
	if !p.given || p.low == 0 && p.high == math.MaxUint16 && p.protocol != proxier.SCTP {
		return "-m " + p.name
	}
	text := fmt.Sprintf("-m %s %s--dport %d", p.name, negated(p.not), p.low)
	if p.high != p.low {
		text += fmt.Sprintf(":%d", p.high)
	}
	return text
}

// parseMark parses VALUE or VALUE/MASK.
func parseMark(s string) (value, mask uint32, err error) {
	v, m, masked := strings.Cut(s, "/")
	n, err1 := strconv.ParseUint(v, 0, 32)
	value, mask = uint32(n), math.MaxUint32
	var err2 error
	if masked {
		n, err2 = strconv.ParseUint(m, 0, 32)
		mask = uint32(n)
	}
	if err1 != nil || err2 != nil {
		return 0, 0, fmt.Errorf("mark %q", s)
	}
	return value, mask, nil
}

// markMatch matches the packet's mark.
type markMatch struct {
	value, mask uint32
	given, not  bool
}

func (m *markMatch) option(name string, not bool, w *words) error {
	if name != "--mark" {
		return errNotMine
	}
	value, err := w.value(name)
	if err != nil {
		return err
	}
	m.given, m.not = true, not
	m.value, m.mask, err = parseMark(value)
	return err
}

func (m *markMatch) finish(*rule) error {
	if !m.given {
		return errors.New("mark without --mark")
	}
	return nil
}

func (m *markMatch) matches(w *walk) bool { return (w.mark&m.mask == m.value) != m.not }

func (m *markMatch) String() string {
	text := fmt.Sprintf("-m mark %s--mark %#x", negated(m.not), m.value)
	if m.mask != math.MaxUint32 {
		text += fmt.Sprintf("/%#x", m.mask)
	}
	return text
}

// states are those of conntrack in the order of iptables-save.
var states = []struct {
	name string
	is   func(*walk) bool
}{
	{"INVALID", func(w *walk) bool { return w.packet.State == StateInvalid }},
	{"NEW", func(w *walk) bool { return w.packet.State == StateNew }},
	{"RELATED", func(w *walk) bool { return w.packet.State == StateRelated }},
	{"ESTABLISHED", func(w *walk) bool { return w.packet.State == StateEstablished }},
	{"UNTRACKED", func(*walk) bool { return false }},
	{"SNAT", func(w *walk) bool { return w.result.Masqueraded }},
	{"DNAT", func(w *walk) bool { return w.translated }},
}

// ctstate matches conntrack's state of the packet, including its translation.
type ctstate struct {
	states uint8 // bits by index of states
	not    bool
}

func (m *ctstate) option(name string, not bool, w *words) error {
	if name != "--ctstate" {
		return errNotMine
	}
	value, err := w.value(name)
	if err != nil {
		return err
	}
	m.not = not
	for s := range strings.SplitSeq(value, ",") {
		before := m.states
		for i := range states {
			if states[i].name == s {
				m.states |= 1 << i
			}
		}
		if m.states == before {
			return fmt.Errorf("state %q is unknown or listed twice", s)
		}
	}
	return nil
}

func (m *ctstate) finish(*rule) error {
	if m.states == 0 {
		return errors.New("conntrack without --ctstate")
	}
	return nil
}

func (m *ctstate) matches(w *walk) bool {
	for i := range states {
		if m.states&(1<<i) != 0 && states[i].is(w) {
			return !m.not
		}
	}
	return m.not
}

func (m *ctstate) String() string {
	var names []string
	for i := range states {
		if m.states&(1<<i) != 0 {
			names = append(names, states[i].name)
		}
	}
	return "-m conntrack " + negated(m.not) + "--ctstate " + strings.Join(names, ",")
}

// addrtype matches local addresses.
type addrtype struct{ src, dst kindOf }

// kindOf is the condition for one of the addresses.
type kindOf struct{ given, not bool }

func (k kindOf) is(w *walk, a netip.Addr) bool { return !k.given || w.local(a) != k.not }

func (m *addrtype) option(name string, not bool, w *words) error {
	var kind *kindOf
	switch name {
	case "--src-type":
		kind = &m.src
	case "--dst-type":
		kind = &m.dst
	default:
		return errNotMine
	}
	value, err := w.value(name)
	if err == nil && value != "LOCAL" {
		err = fmt.Errorf("type %q, not LOCAL", value)
	}
	*kind = kindOf{given: true, not: not}
	return err
}

func (m *addrtype) finish(*rule) error {
	if !m.src.given && !m.dst.given {
		return errors.New("addrtype without --src-type or --dst-type")
	}
	return nil
}

func (m *addrtype) matches(w *walk) bool {
	return m.src.is(w, w.packet.Src.Addr()) && m.dst.is(w, w.to.Addr())
}

func (m *addrtype) String() string {
	text := "-m addrtype"
	if m.src.given {
		text += " " + negated(m.src.not) + "--src-type LOCAL"
	}
	if m.dst.given {
		text += " " + negated(m.dst.not) + "--dst-type LOCAL"
	}
	return text
}

// statistic matches randomly.
type statistic struct {
	random    bool
	threshold int64 // probability, as a part of one
	not       bool
}

// one is probability 1: the kernel has 31 bits for a probability.
const one = 1 << 31

func (m *statistic) option(name string, not bool, w *words) error {
	if name != "--mode" && name != "--probability" {
		return errNotMine
	}
	value, err := w.value(name)
	if err != nil {
		return err
	}
	if name == "--mode" {
		if m.random = value == "random"; !m.random {
			return fmt.Errorf("mode %q", value)
		}
		return noNot(not)
	}
	p, err := strconv.ParseFloat(value, 64)
	if err != nil || p < 0 || p > 1 {
		return fmt.Errorf("probability %q", value)
	}
	m.threshold, m.not = int64(math.Round(p*one)), not
	return nil
}

func (m *statistic) finish(*rule) error {
	if !m.random || m.threshold == unset {
		return errors.New("statistic without --mode or --probability")
	}
	return nil
}

func (m *statistic) matches(w *walk) bool {
	p := float64(m.threshold) / one
	if m.not {
		p = 1 - p
	}
	if p == 0 || p == 1 {
		return p == 1 // not random
	}
	return w.roll(p)
}

func (m *statistic) String() string {
	return fmt.Sprintf("-m statistic --mode random %s--probability %.11f", negated(m.not), float64(m.threshold)/one)
}
