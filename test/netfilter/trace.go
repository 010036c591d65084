// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// State is how conntrack knows a packet.
type State uint8

// The states. Only first packets of connections meet the nat table.
const (
	StateNew State = iota
	StateInvalid
	StateEstablished
	StateRelated
)

// Packet is a packet to be traced.
type Packet struct {
	Src, Dst netip.AddrPort
	Protocol proxier.Protocol
	ICMPType uint8
	// In is the device it comes in by; empty if this host sends it.
	In string
	// Out is the device it leaves by if it does. Where it leads does not count:
	// translated or not, it is the same one. A packet that stays has lo.
	Out string
	// Local says whether an address is this host's. Loopback addresses always are.
	Local func(netip.Addr) bool
	// Own is the address of the device In, to which REDIRECT leads; if it is missing
	// the packet keeps its destination.
	Own   netip.Addr
	State State
	Mark  uint32
}

// Verdict is what becomes of a packet.
type Verdict uint8

// The verdicts.
const (
	Accept Verdict = iota
	Drop
	Reject
)

func (v Verdict) String() string {
	switch v {
	case Accept:
		return "accept"
	case Drop:
		return "drop"
	}
	return "reject"
}

// Result is what happens to a packet.
type Result struct {
	Verdict Verdict
	// Kind is how the packet is rejected, in the words of --reject-with.
	Kind string
	// To is where the packet goes, after any translation.
	To netip.AddrPort
	// Masqueraded says that it goes there with an address of this host as source.
	Masqueraded bool
	// Mark is the mark it ends with.
	Mark uint32
	// Steps are the rules that matched, as iptables-save prints them behind the name of
	// their table, and the policy that decided, if one did.
	Steps []string
}

// String is the result in a line, and the steps in one each.
func (r Result) String() string {
	text := r.Verdict.String()
	if r.Kind != "" {
		text += " with " + r.Kind
	}
	text += fmt.Sprintf(" to %s", r.To)
	if r.Masqueraded {
		text += ", masqueraded"
	}
	return strings.Join(append([]string{text}, r.Steps...), "\n\t")
}

// walk is a packet on its way.
type walk struct {
	tables *Tables
	packet *Packet
	roll   func(probability float64) bool
	// rehearsal leaves the lists of -m recent as they are.
	rehearsal bool

	in, out    string
	src, dst   bits128
	to         netip.AddrPort
	mark       uint32
	translated bool // by DNAT or REDIRECT
	redirected bool // to this host
	result     Result
}

// Trace sends a packet through the hooks.
func (t *Tables) Trace(p Packet) Result {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.trace(&p, func(probability float64) bool { return t.Random() < probability }, false)
}

func (t *Tables) trace(p *Packet, roll func(float64) bool, rehearsal bool) Result {
	w := &walk{
		tables: t, packet: p, roll: roll, rehearsal: rehearsal,
		in: p.In, src: wordsOf(p.Src.Addr()), dst: wordsOf(p.Dst.Addr()), to: p.Dst, mark: p.Mark,
	}
	w.route()
	w.result.To, w.result.Mark = w.to, w.mark
	return w.result
}

// route leads the packet from hook to hook.
func (w *walk) route() {
	if w.in == "" {
		w.send()
		return
	}
	if !w.through("PREROUTING", "mangle", "nat") {
		return
	}
	if w.arrived() {
		w.through("INPUT", "mangle", "filter", "nat")
		return
	}
	w.out = w.packet.Out
	if w.through("FORWARD", "mangle", "filter") {
		w.through("POSTROUTING", "mangle", "nat")
	}
}

// send is for a packet of this host. It is routed before its destination is translated
// and again after; to the rules of OUTPUT the device stays that of the first route. A
// packet that stays comes in again by the loopback device; the nat table does not see
// it a second time.
func (w *walk) send() {
	w.out = w.outDevice()
	if !w.through("OUTPUT", "mangle", "nat", "filter") {
		return
	}
	w.out = w.outDevice()
	if !w.through("POSTROUTING", "mangle", "nat") || !w.arrived() {
		return
	}
	w.in, w.out = loopback, ""
	if w.through("PREROUTING", "mangle") {
		w.through("INPUT", "mangle", "filter")
	}
}

const loopback = "lo"

func (w *walk) outDevice() string {
	if w.arrived() {
		return loopback
	}
	return w.packet.Out
}

func (w *walk) arrived() bool { return w.redirected || w.local(w.to.Addr()) }

func (w *walk) local(a netip.Addr) bool {
	return a.IsLoopback() || w.packet.Local != nil && w.packet.Local(a)
}

// through sends the packet through a hook's chain in some tables, and says
// whether it goes on.
func (w *walk) through(hook string, tables ...string) bool {
	for _, name := range tables {
		if name == "nat" && !w.natted() {
			continue
		}
		table := w.tables.tables[name]
		chain := table.chains[hook]
		switch w.chain(table, chain) {
		case accepted:
		case dropped:
			w.result.Verdict = Drop
			return false
		case rejected:
			w.result.Verdict = Reject
			return false
		default:
			if chain.policy == "DROP" {
				w.result.Verdict = Drop
				w.result.Steps = append(w.result.Steps, name+" policy of "+hook+": DROP")
				return false
			}
		}
	}
	return true
}

// natted says whether the nat table sees the packet: the first of a connection, related
// to another one or not. An error message belongs to the connection it is about.
func (w *walk) natted() bool {
	switch w.packet.State {
	case StateNew:
		return true
	case StateRelated:
		return w.packet.Protocol != ICMP && w.packet.Protocol != ICMPv6
	}
	return false
}

func (w *walk) chain(t *table, c *chain) outcome {
	for _, r := range c.rules {
		if !r.matchesPacket(w) {
			continue
		}
		w.result.Steps = append(w.result.Steps, t.name+" "+c.name+" "+r.text)
		o := goOn
		switch {
		case r.target != nil:
			o = r.target.act(w)
		case r.jump != "":
			if o = w.chain(t, t.chains[r.jump]); o == returned {
				o = goOn
			}
		}
		if o != goOn {
			return o
		}
	}
	return goOn
}

// translate gives the packet another destination; a port of zero, or an address that
// is missing, leaves what is there.
func (w *walk) translate(to netip.Addr, port uint16) {
	if !to.IsValid() {
		to = w.to.Addr()
	}
	if port == 0 {
		port = w.to.Port()
	}
	was := w.to
	w.to, w.dst = netip.AddrPortFrom(to, port), wordsOf(to)
	w.translated = w.translated || w.to != was // as conntrack sees it
}
