// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hostfilter

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/nftables"
	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// saved is a table of iptables, as iptables-save prints it.
type saved struct {
	*xtables.Table
	family  inet.Family
	variant string
}

func (t *saved) String() string {
	return fmt.Sprintf("table %s of iptables (%s, %s)", t.Name, t.family, t.variant)
}

// base returns a built-in chain, if there is one, and the packets that pass it.
func (t *saved) base(name string) (c *xtables.Chain, within inet.Match) {
	within.Not[1-t.family] = true
	return t.Chain(name), within
}

// rules reads those of a chain; of none if a target is no chain.
func (t *saved) rules(chain string) (list []step, err error) {
	c := t.Chain(chain)
	if c == nil {
		return nil, nil
	}
	for _, rule := range c.Rules {
		if s, begins := parse(rule); begins {
			s.where = fmt.Sprintf("rule -A %s %s in %s", chain, rule, t)
			list = append(list, s)
		}
	}
	return list, nil
}

// beforeDNAT finds rules that drop in chain PREROUTING.
func (t *saved) beforeDNAT(to *found) {
	const base = "PREROUTING"
	if c, within := t.base(base); c != nil {
		newWalk(t.rules, to).begin(base, within, c.Policy == "DROP", fmt.Sprintf("policy DROP of chain %s in %s", base, t))
	}
}

// firewall reports whether chain FORWARD drops what it does not know.
func (t *saved) firewall() (f Firewall, drops bool) {
	const base = "FORWARD"
	c, within := t.base(base)
	if c == nil {
		return f, false
	}
	return newWalk(t.rules, nil).firewall(base, within, c.Policy == "DROP", false, fmt.Sprintf("chain %s in %s", base, t))
}

// parse reads a rule. It begins if the rule matches packets that begin a connection.
func parse(rule string) (s step, begins bool) {
	s.Exact, begins = true, true
	words := split(rule)
	narrow := func(m inet.Match) {
		both, some := s.Match.And(m)
		if s.Match = both; !some {
			begins = false
		}
	}
	for i, inverted := 0, false; i < len(words); i++ {
		word := words[i]
		if word == "!" {
			inverted = true
			continue
		}
		not := inverted
		inverted = false
		value := func() string {
			if i+1 < len(words) {
				i++
				return words[i]
			}
			return ""
		}
		switch word {
		case "-p":
			protocol, known := protocolOf(value())
			switch {
			case not || !known:
				s.Exact = false
			default:
				narrow(inet.Match{Protocol: protocol})
			}
		case "-d":
			p, err := netip.ParsePrefix(value())
			if not || err != nil {
				s.Exact = false
				continue
			}
			narrow(inet.Match{Destinations: []netip.Prefix{p}})
		case "--dport", "--dports":
			ports, ok := portsOf(value())
			if not || !ok {
				s.Exact = false
				continue
			}
			narrow(inet.Match{Ports: ports})
		case "-m":
			switch value() {
			case "rpfilter":
				begins = false
			case "comment", "tcp", "udp", "sctp", "multiport":
			default:
				s.Exact = false
			}
		case "--comment":
			value()
		case "--ctstate", "--state":
			states := strings.Split(value(), ",")
			s.Status = s.Status || slices.Contains(states, "DNAT")
			if !not && !slices.ContainsFunc(states, func(state string) bool { return slices.Contains([]string{"NEW", "UNTRACKED", "SNAT", "DNAT"}, state) }) {
				begins = false
			}
		case "--ctstatus", "--ctorigdst", "--ctorigdstport":
			s.Status = true
		case "--tcp-flags":
			mask, flags := strings.Split(value(), ","), value()
			first := "NONE"
			if slices.Contains(mask, "SYN") || slices.Contains(mask, "ALL") {
				first = "SYN"
			}
			if (flags == first) == not {
				begins = false
			}
			s.Exact = false
		case "-j", "-g":
			target := value()
			switch {
			case nftables.IsDropTarget(target):
				s.Verdict = nftables.Drop
			case target == "ACCEPT":
				s.Verdict = nftables.Accept
			case target == "RETURN":
				s.Verdict = nftables.Return
			case word == "-g":
				s.Verdict, s.Target = nftables.Goto, target
			default: // a chain; a target that is none leads nowhere
				s.Verdict, s.Target = nftables.Jump, target
			}
			return s, begins // options of the target follow
		default:
			s.Exact = false
		}
	}
	return s, begins
}

// split cuts a rule into words as a shell would.
func split(rule string) (words []string) {
	var word strings.Builder
	quoted, any := false, false
	for i := 0; i < len(rule); i++ {
		switch c := rule[i]; {
		case c == '"':
			quoted, any = !quoted, true
		case c == '\\' && quoted && i+1 < len(rule):
			i++
			word.WriteByte(rule[i])
		case c == ' ' && !quoted:
			if any {
				words = append(words, word.String())
			}
			word.Reset()
			any = false
		default:
			word.WriteByte(c)
			any = true
		}
	}
	if any {
		words = append(words, word.String())
	}
	return words
}

// protocolOf knows the protocols of Services; others get the number of none.
func protocolOf(name string) (p inet.Protocol, known bool) {
	for _, p := range []inet.Protocol{inet.TCP, inet.UDP, inet.SCTP} {
		if strings.EqualFold(name, p.String()) {
			return p, true
		}
	}
	if n, err := strconv.ParseUint(name, 10, 8); err == nil && n > 0 {
		return inet.Protocol(n), true
	}
	switch name {
	case "icmp", "ipv6-icmp", "icmpv6", "igmp", "esp", "ah", "gre", "ipip", "ipencap", "udplite", "vrrp", "ospf", "pim":
		return 255, true // reserved: no packet has it
	}
	return 0, false // all, or one that is not known here
}

func portsOf(text string) (list []inet.PortRange, ok bool) {
	for _, part := range strings.Split(text, ",") {
		low, high, isRange := strings.Cut(part, ":")
		first, err := strconv.ParseUint(low, 10, 16)
		if err != nil {
			return nil, false
		}
		last := first
		if isRange {
			if last, err = strconv.ParseUint(high, 10, 16); err != nil {
				return nil, false
			}
		}
		list = append(list, inet.PortRange{First: uint16(first), Last: uint16(last)})
	}
	return list, true
}
