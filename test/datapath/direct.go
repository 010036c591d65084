// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/packet"
)

// Dispatch is the form in which one node sends clients' packets to another one for direct server
// return.
type Dispatch interface {
	String() string
	// Overhead is the number of bytes that it adds to a packet.
	Overhead(v6 bool) int
}

// Tunnel is a form in which the client's packet is in another one.
type Tunnel interface {
	Dispatch
	// Send returns the packet that a node sends instead of a client's, both from their IP header
	// on and without padding. sport is for forms that have a source port.
	Send(p []byte, from, to netip.Addr, sport uint16) []byte
	// receive returns the length of what is before the client's packet at the beginning of a
	// packet of that form; 0 for any other packet.
	receive(p []byte) int
	// sport returns the source port of a packet of that form, if it has one.
	sport(p []byte) uint16
}

// Direct is what a node knows for direct server return.
type Direct struct {
	Dispatch Dispatch
	// Sources are prefixes, one of a family, of the addresses that IP in IP comes from.
	Sources []netip.Prefix
	// Takes reports whether the node of a backend takes packets of other nodes.
	Takes func(backend netip.Addr) bool
	// IsNode reports whether an address may send such packets to this node, and IsOfCluster
	// whether a client may be on the node of a backend.
	IsNode, IsOfCluster func(netip.Addr) bool
}

// The forms that nodes take.
var (
	Tunnels    = []Tunnel{IPIP{}, Geneve{}}
	Dispatches = []Dispatch{IPIP{}, Geneve{}, Opt{}}
)

const (
	outerTTL    = 64
	protoIPIP   = 4
	protoIPv6   = 41
	genevePort  = 6081
	geneveVNI   = 0x54444d
	geneveBytes = 8 + 8 // UDP and Geneve
	firstSport  = 0xc000
)

// IPIP puts packets into IP packets (RFC 2003, RFC 2473).
type IPIP struct{}

func (IPIP) String() string { return "ipip" }

// Overhead implements Dispatch.
func (IPIP) Overhead(v6 bool) int { return ipSize(v6) }

// Send implements Tunnel.
func (IPIP) Send(p []byte, from, to netip.Addr, _ uint16) []byte {
	protocol := uint8(protoIPIP)
	if from.Is6() {
		protocol = protoIPv6
	}
	return inPacket(p, from, to, packet.Packet{Payload: p}, protocol)
}

func (IPIP) receive(p []byte) int {
	if is, v6 := hasPlainHeader(p, protoIPIP, protoIPv6); is {
		return ipSize(v6)
	}
	return 0
}

func (IPIP) sport([]byte) uint16 { return 0 }

// Geneve has UDP and Geneve in between (RFC 8926).
type Geneve struct{}

func (Geneve) String() string { return "geneve" }

// Overhead implements Dispatch.
func (Geneve) Overhead(v6 bool) int { return ipSize(v6) + geneveBytes }

// Send implements Tunnel.
func (Geneve) Send(p []byte, from, to netip.Addr, sport uint16) []byte {
	header := make([]byte, 8, 8+len(p))
	be.PutUint16(header[2:], packet.EtherIPv4)
	if from.Is6() {
		be.PutUint16(header[2:], packet.EtherIPv6)
	}
	be.PutUint32(header[4:], geneveVNI<<8)
	q := packet.Packet{UDP: &packet.UDP{Src: sport, Dst: genevePort, Checksum: new(uint16(0))}, Payload: append(header, p...)}
	return inPacket(p, from, to, q, 0)
}

func (g Geneve) receive(p []byte) int {
	is, v6 := hasPlainHeader(p, packet.ProtoUDP, packet.ProtoUDP)
	size := g.Overhead(v6)
	if !is || len(p) < size {
		return 0
	}
	ethertype := uint16(packet.EtherIPv4)
	if v6 {
		ethertype = packet.EtherIPv6
	}
	u := p[ipSize(v6):]
	if be.Uint16(u[2:]) != genevePort || u[8] != 0 || be.Uint16(u[10:]) != ethertype || be.Uint32(u[12:]) != geneveVNI<<8 {
		return 0
	}
	return size
}

func (Geneve) sport(p []byte) uint16 {
	if at := ipSize(len(p) > 0 && p[0]>>4 == 6); len(p) >= at+2 {
		return be.Uint16(p[at:])
	}
	return 0
}

func ipSize(v6 bool) int {
	if v6 {
		return 40
	}
	return 20
}

// inPacket gives a payload an IP header that has the class, the marks of ECN and the flow label of
// the client's packet.
func inPacket(inner []byte, from, to netip.Addr, q packet.Packet, protocol uint8) []byte {
	if from.Is6() {
		first := be.Uint32(inner)
		q.IPv6 = &packet.IPv6{Src: from, Dst: to, HopLimit: outerTTL, TrafficClass: uint8(first >> 20), FlowLabel: first & 0xfffff, NextHeader: protocol}
	} else {
		q.IPv4 = &packet.IPv4{Src: from, Dst: to, TTL: outerTTL, TOS: inner[1], DontFragment: true, Protocol: protocol}
	}
	return q.Build()
}

// hasPlainHeader reports whether a packet has an IP header without options, is no fragment, and
// has one of these protocols, by family.
func hasPlainHeader(p []byte, four, six uint8) (is, v6 bool) {
	if len(p) >= 40 && p[0]>>4 == 6 {
		return p[6] == six, true
	}
	return len(p) >= 20 && p[0] == 0x45 && be.Uint16(p[6:])&0x3fff == 0 && p[9] == four, false
}

// wrapper is the packet in which a client's packet came from another node. With an option, from is known only
// of probes and for NodePorts; ports are known only with one.
type wrapper struct {
	from     netip.Addr
	to       netip.AddrPort
	dispatch Dispatch
}

// unwrap returns the client's packet of one that another node sent. Others, such as those of CNIs' tunnels,
// stay as they are.
func (m *Model) unwrap(h *header, result parsed) *header {
	if m.node.Pod || result == broken {
		return nil
	}
	if u := m.takeTunneled(h, result); u != nil || result == foreign {
		return u
	}
	return m.takeOption(h)
}

// takeTunneled takes a client's packet out of a tunnel.
func (m *Model) takeTunneled(h *header, result parsed) *header {
	if result == understood && (h.protocol != packet.ProtoUDP || h.place != whole || h.tuple.Dst.Port() != genevePort) {
		return nil
	}
	outer := h.frame[h.l3:]
	for _, d := range Tunnels {
		size := d.receive(outer)
		if size == 0 {
			continue
		}
		w := wrapperOf(outer, d)
		u, result := parse(slices.Concat(h.frame[:h.l3], outer[size:]), h.l3)
		u.wrapper = w
		spread := contains(m.node.Direct.Sources, w.from)
		if spread {
			w.from = m.sender(u)
		}
		if result != understood || !m.isForTarget(u) || !spread && !m.node.Direct.IsNode(w.from) {
			return nil
		}
		u.receiveMark(outer)
		m.Counted["UNWRAP"]++
		return u
	}
	return nil
}

// sender returns the node that sent a packet which does not say so: a probe is of its source, and any other
// packet may be for a NodePort of the node whose address it has.
func (m *Model) sender(h *header) (from netip.Addr) {
	from = h.dst
	if h.isICMP() {
		from = h.src
	}
	if !m.node.Direct.IsNode(from) {
		return netip.Addr{}
	}
	return from
}

// wrapperOf reads the addresses of an IP header.
func wrapperOf(outer []byte, d Tunnel) *wrapper {
	p := packet.ParseIP(outer)
	return &wrapper{from: p.Source().Addr(), to: netip.AddrPortFrom(p.Destination().Addr(), 0), dispatch: d}
}

// receiveMark sets the mark of congestion of the outer header in the packet, if its ends know such
// marks (RFC 6040).
func (h *header) receiveMark(outer []byte) {
	const congested = 3
	e := edit(h.frame)
	if h.v6 {
		if at := h.l3 + 1; outer[1]>>4&3 == congested && e.frame[at]>>4&3 != 0 {
			e.frame[at] |= congested << 4
		}
	} else if tos := e.frame[h.l3+1]; outer[1]&3 == congested && tos&3 != 0 {
		e.set(h.l3, []byte{e.frame[h.l3], tos | congested}, h.l3+10)
	}
	h.frame = e.frame
}

// isForTarget reports whether a packet in one of another node is for this node: of a connection to a
// local backend, to a frontend, or an ICMP message to a backend of direct server return.
func (m *Model) isForTarget(h *header) bool {
	if h.isICMP() {
		return h.place == whole && slices.ContainsFunc(m.services, func(d *proxier.Decision) bool { return m.target(d, h) != nil })
	}
	if !m.followFragment(h) {
		return false
	}
	if f, reply := m.find(h.tuple); f != nil && !reply && !f.Remote && !f.Remapped {
		return true
	}
	d, _ := m.frontend(h)
	return d != nil && slices.ContainsFunc(m.services, (*proxier.Decision).Direct)
}

// target returns the local backend that another node selected for a packet; nil for none.
func (m *Model) target(d *proxier.Decision, h *header) *proxier.Backend {
	if h.wrapper == nil || !d.Direct() {
		return nil
	}
	for i := range d.Backends {
		if b := &d.Backends[i]; b.Local && b.Addr.Addr() == h.wrapper.to.Addr() {
			return b
		}
	}
	return nil
}

// isDirect reports whether a new connection to a backend goes there by direct server return.
func (m *Model) isDirect(h *header, f *proxier.Frontend, route proxier.Route, b proxier.Backend) bool {
	source, own := m.ownSource(h, route, b)
	return own && !m.node.Pod && route.Direct && b.Remote && m.node.Direct.Takes(b.Addr.Addr()) && h.wrapper == nil &&
		!contains(m.rules.Pods.CIDRs, h.src) && !m.node.Direct.IsOfCluster(h.src) &&
		(f.Kind != proxier.NodePort || h.dst == source)
}

// takesDirect reports whether the node of a flow's backend still takes new connections.
func (m *Model) takesDirect(f *Flow) bool {
	at := slices.IndexFunc(m.services, func(d *proxier.Decision) bool { return d.Name == f.backend.service })
	return at >= 0 && m.serves(f.backend) && m.services[at].Direct() && m.node.Direct.Takes(f.backend.addr.Addr()) &&
		slices.ContainsFunc(m.services[at].Backends, func(b proxier.Backend) bool { return b.Remote && b.Addr == f.backend.addr })
}

// overhead returns how many bytes are added to packets to a backend.
func (m *Model) overhead(h *header, direct bool) int {
	if !direct {
		return 0
	}
	return m.node.Direct.Dispatch.Overhead(h.v6)
}

// sendDirect makes of an edited packet the one that is sent to a backend's node.
func (m *Model) sendDirect(out outcome, h *header, f *Flow) outcome {
	to := f.Reply.Reversed()
	d, is := m.node.Direct.Dispatch.(Tunnel)
	switch {
	case is:
		e := out.editor
		from := m.source(h, d, to.Src.Addr())
		e.frame = slices.Concat(e.frame[:h.l3], d.Send(e.frame[h.l3:h.end], from.Addr(), to.Dst.Addr(), from.Port()), e.frame[h.end:])
		e.move(h.l3, d.Overhead(h.v6))
	case !f.needsOption(h):
		out.translate(h, to.Dst)
	case !out.sendWithOption(h, to.Dst):
		return drop("DROP_REWRITE")
	}
	return out
}

// source returns the source that the programs have to use: for a flow, the one that they chose for
// its first packet; any for an ICMP error.
func (m *Model) source(h *header, d Tunnel, own netip.Addr) netip.AddrPort {
	at, known := m.sources[h.tuple]
	if !known && len(m.got.Frame) > m.node.L2 {
		outer := m.got.Frame[m.node.L2:]
		at = netip.AddrPortFrom(packet.ParseIP(outer).Source().Addr(), max(firstSport, d.sport(outer)))
	}
	if !h.isICMP() {
		m.sources[h.tuple] = at
	}
	i := slices.IndexFunc(m.node.Direct.Sources, func(p netip.Prefix) bool { return p.Addr().Is6() == h.v6 })
	switch _, spreads := d.(IPIP); {
	case !spreads || i < 0:
		return netip.AddrPortFrom(own, at.Port())
	case !m.node.Direct.Sources[i].Contains(at.Addr()):
		return netip.AddrPortFrom(m.node.Direct.Sources[i].Addr(), at.Port())
	}
	return at
}

// lowerMSS lowers the maximum segment size in a SYN-ACK to a client whose node adds bytes to its
// packets.
func (e *editor) lowerMSS(h *header, d Dispatch) {
	const kind, least = 2, 536
	if h.flags()&packet.SYN == 0 || h.place != whole || h.frame[h.l4+12]>>4 < 6 {
		return
	}
	at, over := h.l4+20, d.Overhead(h.v6)
	mss := int(be.Uint16(e.frame[at+2:]))
	if e.frame[at] == kind && e.frame[at+1] == 4 && mss >= least+over {
		e.set(at+2, be.AppendUint16(nil, uint16(mss-over)), h.l4+16)
	}
}

// followOuterError handles an ICMP error of a router about a packet that this node sent to a
// backend's node: its client is told instead.
func (m *Model) followOuterError(h *header) outcome {
	message := uint16(h.frame[h.l4])<<8 | uint16(h.frame[h.l4+1])
	tooBig := message == packet.FragNeeded
	tells := tooBig || message == packet.NetUnreachable || message == packet.HostUnreachable
	if h.v6 {
		tooBig = h.frame[h.l4] == packet.PacketTooBig6>>8
		tells = tooBig || message == packet.NoRoute6 || message == packet.NoRoute6|3
	}
	if !tells {
		return pass(h.frame)
	}
	outer := h.frame[h.l4+8:]
	if len(outer) == 0 || (outer[0]>>4 == 6) != h.v6 {
		return pass(h.frame)
	}
	for _, d := range Tunnels {
		size := d.receive(outer)
		if size == 0 {
			continue
		}
		q, ok := parseQuoted(h.frame, h.l4+8+size, h.end, h.v6)
		if !ok {
			continue
		}
		f, reply := m.find(q.tuple)
		if f == nil || reply || !f.Direct || f.backend.addr.Addr() != wrapperOf(outer, d).to.Addr() {
			continue
		}
		mtu := int(be.Uint32(h.frame[h.l4+4:]))
		if !h.v6 {
			mtu &= 0xffff
		}
		switch {
		case tooBig && mtu <= size:
			return drop("")
		case tooBig:
			return m.tooBig(m.unquoted(h, q), mtu-size)
		case h.v6:
			return m.sendError(m.unquoted(h, q), "FORWARD_ICMP", packet.NoRoute6|3, 0)
		}
		return m.sendError(m.unquoted(h, q), "FORWARD_ICMP", packet.HostUnreachable, 0)
	}
	return pass(h.frame)
}

// unquoted returns a quoted packet as if it had come itself.
func (m *Model) unquoted(h, q *header) *header {
	taken := q.l3 - h.l3
	u := *q
	u.wrapper = &wrapper{}
	u.frame = slices.Concat(h.frame[:h.l3], h.frame[q.l3:])
	u.l3, u.l4, u.end = q.l3-taken, q.l4-taken, q.end-taken
	return &u
}
