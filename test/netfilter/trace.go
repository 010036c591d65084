// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// State is conntrack's state of a packet.
type State uint8

// The states. Only the first packets of connections traverse the nat table.
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
	// In is the incoming device; empty if this host sends it.
	In string
	// Out is the outgoing device, if the packet leaves the host. It is the same before and
	// after translation. Packets to this host have lo.
	Out string
	// Local reports whether an address belongs to this host. Loopback addresses always do.
	Local func(netip.Addr) bool
	// Own is the address of the device In, the destination of REDIRECT; if it is missing,
	// the packet keeps its destination.
	Own   netip.Addr
	State State
	Mark  uint32
}

// Verdict is the final decision about a packet.
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

// Result is the result of a trace.
type Result struct {
	Verdict Verdict
	// Kind is how the packet is rejected, as a value of --reject-with.
	Kind string
	// To is the destination of the packet, after any translation.
	To netip.AddrPort
	// Masqueraded says that its source becomes an address of this host.
	Masqueraded bool
	// Mark is its final mark.
	Mark uint32
	// Steps are the rules that matched, as printed by iptables-save, after the name of their
	// table. The last one may be the policy that decided.
	Steps []string
}

// String returns the result in a line, and then each step in a line.
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

// walk is the state of a trace.
type walk struct {
	tables *Tables
	packet *Packet
	roll   func(probability float64) bool
	// rehearsal does not change the lists of -m recent.
	rehearsal bool

	in, out    string
	src, dst   bits128
	to         netip.AddrPort
	mark       uint32
	translated bool // by DNAT or REDIRECT
	redirected bool // to this host
	result     Result
}

// Trace traces a packet through the hooks.
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

// route traces the packet from hook to hook.
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

// send traces a packet of this host. It is routed before and after the translation of its
// destination. Rules of OUTPUT see the device of the first route. A packet to this host
// then enters through the loopback device, where it does not traverse the nat table
// again.
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

// through traces the packet through a hook's chain in the given tables, and reports whether
// it continues.
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

// natted reports whether the packet traverses the nat table: the first packet of a connection
// does, even of a related one. An ICMP error belongs to the connection it is about.
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

// translate changes the packet's destination. A zero port or address keeps the current
// one.
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
