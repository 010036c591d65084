// SPDX-License-Identifier: Apache-2.0

package klipperlb

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// hook is a chain of the kernel's, and the chain of this process that it jumps to. Containers of one pod, one for each port, have chains of
// their own.
type hook struct{ table, from, prefix string }

var hooks = []hook{
	{"filter", "FORWARD", "SVCLB-FWD-"},
	{"nat", "PREROUTING", "SVCLB-PRE-"},
	{"nat", "POSTROUTING", "SVCLB-POST-"},
}

func (e *Environment) chain(h hook) string {
	return fmt.Sprintf("%s%s-%d", h.prefix, strings.ToUpper(e.Protocol), e.Port)
}

// rulesOf are the rules of a chain in one family, without "-A CHAIN".
func (e *Environment) rulesOf(h hook, f inet.Family) (rules []string) {
	for i, target := range e.Targets[f] {
		match := fmt.Sprintf("-d %s -p %s", target, e.Protocol)
		port := fmt.Sprintf("-m %s --dport %d", e.Protocol, e.TargetPort)
		switch {
		case h.table == "filter":
			for _, r := range e.Ranges[f] {
				from := "-s " + r.String() + " "
				if r.Bits() == 0 {
					from = ""
				}
				rules = append(rules, from+match+" "+port+" -j ACCEPT")
			}
			rules = append(rules, match+" "+port+" -j DROP")
		case h.from == "POSTROUTING":
			rules = append(rules, match+" "+port+" -j MASQUERADE")
		case i == 0: // a packet goes to one address
			for _, at := range e.destinations(f) {
				rules = append(rules, fmt.Sprintf("%s-p %s -m %[2]s --dport %d -j DNAT --to-destination %s", at, e.Protocol, e.Port, hostPort(target.String(), e.TargetPort, f)))
			}
		}
	}
	return rules
}

// destinations are matches of the addresses that packets have to have.
func (e *Environment) destinations(f inet.Family) (list []string) {
	for _, a := range e.Sources[f] {
		list = append(list, "-d "+a.String()+" ")
	}
	if len(slices.Concat(e.Sources[:]...)) == 0 {
		list = []string{""}
	}
	return list
}

func hostPort(address string, port uint16, f inet.Family) string {
	if f == inet.IPv6 {
		address = "[" + address + "]"
	}
	return fmt.Sprintf("%s:%d", address, port)
}

// input is for iptables-restore: it writes all chains anew, and the jumps to them that are missing.
func (e *Environment) input(f inet.Family, jumps func(hook) bool) []byte {
	var b strings.Builder
	for _, table := range []string{"filter", "nat"} {
		fmt.Fprintf(&b, "*%s\n", table)
		for _, h := range hooks {
			if h.table == table {
				fmt.Fprintf(&b, ":%s - [0:0]\n", e.chain(h))
			}
		}
		for _, h := range hooks {
			if h.table != table {
				continue
			}
			for _, r := range e.rulesOf(h, f) {
				fmt.Fprintf(&b, "-A %s %s\n", e.chain(h), r)
			}
			if !jumps(h) {
				fmt.Fprintf(&b, "-I %s 1 -j %s\n", h.from, e.chain(h))
			}
		}
		b.WriteString("COMMIT\n")
	}
	return []byte(b.String())
}

// removal is for iptables-restore: it removes the chains, and so many jumps to them.
func (e *Environment) removal(jumps func(hook) int) []byte {
	var b strings.Builder
	for _, table := range []string{"nat", "filter"} { // what is not translated any more is not dropped
		fmt.Fprintf(&b, "*%s\n", table)
		for _, h := range hooks {
			if h.table == table {
				fmt.Fprintf(&b, ":%s - [0:0]\n", e.chain(h))
			}
		}
		for _, h := range hooks {
			if h.table == table {
				b.WriteString(strings.Repeat(fmt.Sprintf("-D %s -j %s\n", h.from, e.chain(h)), jumps(h)))
				fmt.Fprintf(&b, "-X %s\n", e.chain(h))
			}
		}
		b.WriteString("COMMIT\n")
	}
	return []byte(b.String())
}

// state is what a family's tables have.
type state map[string]*xtables.Table

// jumps counts the jumps to a chain of this process.
func (s state) jumps(e *Environment, h hook) (n int) {
	t := s[h.table]
	if t == nil || t.Chain(h.from) == nil {
		return 0
	}
	for _, r := range t.Chain(h.from).Rules {
		if r == "-j "+e.chain(h) {
			n++
		}
	}
	return n
}

// own are the rules of the chains of this process, as the tools print them; nil if a chain, or a jump to one, is missing.
func (s state) own(e *Environment) (rules [][]string) {
	for _, h := range hooks {
		t := s[h.table]
		if t == nil || t.Chain(e.chain(h)) == nil || s.jumps(e, h) == 0 {
			return nil
		}
		rules = append(rules, t.Chain(e.chain(h)).Rules)
	}
	return rules
}
