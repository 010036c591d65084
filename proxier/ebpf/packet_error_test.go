// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"net/netip"

	"github.com/tandem-proxy/tandem/test/packet"
)

// message returns the ICMP or the ICMPv6 message, by family.
func (e ends) message(four, six uint16) uint16 {
	if e.client.Addr().Is4() {
		return four
	}
	return six
}

func sized(p packet.Packet, length int) packet.Packet {
	p.Payload = bytes.Repeat([]byte("x"), length-len(p.Build())+len(p.Payload))
	return p
}

// hopScenes are about expired hop limits, and packets longer than the MTU.
func hopScenes(p *path, e ends) []scene {
	const SYN, ACK = packet.SYN, packet.ACK
	expired := e.message(packet.TimeExceeded, packet.TimeExceeded6)
	tooBig := e.message(packet.FragNeeded, packet.PacketTooBig6)
	begun := step{in, tcp(e.client, e.remote, SYN), redirect, forwarded(tcp(e.nat, e.there, SYN)), "FORWARD_REMOTE", nil}
	fits := sized(tcp(e.client, e.remote, ACK), node2MTU)
	long := sized(tcp(e.client, e.remote, ACK), node2MTU+1)
	longReply := sized(tcp(e.there, e.nat, ACK), 1501)
	longDatagram := sized(udp(e.client, e.remote), 1500)
	noDF := long.Clone()
	if noDF.IPv4 != nil {
		noDF.IPv4.DontFragment = false
		long.IPv4.DontFragment = true
	}
	return []scene{
		{
			name: "time exceeded on the way to another node",
			steps: []step{
				{in, withTTL(tcp(e.client, e.remote, SYN), 1), redirect,
					p.icmp(e.remote, expired, 0, withTTL(tcp(e.client, e.remote, SYN), 1)), "ERROR_TTL", nil},
				{in, withTTL(udp(e.client, e.remote), 0), redirect,
					p.icmp(e.remote, expired, 0, withTTL(udp(e.client, e.remote), 0)), "ERROR_TTL", nil},
				begun,
				{in, withTTL(tcp(e.there, e.nat, SYN|ACK), 1), redirect,
					p.icmp(e.nat, expired, 0, withTTL(tcp(e.there, e.nat, SYN|ACK), 1)), "ERROR_TTL", nil},
				{in, withTTL(tcp(e.client, e.remote, ACK), 2), redirect, withTTL(tcp(e.nat, e.there, ACK), 1), "FORWARD_REMOTE", nil},
			},
		},
		{
			name: "what stays on this node has not arrived yet",
			steps: []step{
				{in, withTTL(tcp(e.client, e.local, SYN), 1), next, withTTL(tcp(e.client, e.here, SYN), 1), "FORWARD_LOCAL", nil},
			},
		},
		{
			name: "too long for the way to the backend",
			steps: []step{
				begun,
				{in, fits, redirect, forwarded(sized(tcp(e.nat, e.there, ACK), node2MTU)), "FORWARD_REMOTE", nil},
				{in, long, redirect, p.icmp(e.remote, tooBig, node2MTU, long), "ERROR_TOO_BIG", nil},
				{in, noDF, redirect, p.icmp(e.remote, tooBig, node2MTU, noDF), "ERROR_TOO_BIG", nil},
				{in, longDatagram, redirect, p.icmp(e.remote, tooBig, node2MTU, longDatagram), "ERROR_TOO_BIG", nil},
			},
		},
		{
			name: "too long for the way to the client",
			steps: []step{
				begun,
				{in, longReply, redirect, p.icmp(e.nat, tooBig, 1500, longReply), "ERROR_TOO_BIG", nil},
			},
		},
	}
}

// quoting returns an ICMP error about a packet. It quotes keep bytes after the IP header, or the
// whole packet if keep is 0.
func quoting(from netip.Addr, message uint16, rest uint32, about packet.Packet, keep int) packet.Packet {
	q := packet.NewError(from, message, rest, about)
	b := about.Build()
	if keep > 0 {
		b = b[:len(b)-len(about.Transport())+keep]
	}
	cut := packet.ParseIP(b)
	q.ICMP.Quoted, q.Payload = &cut, nil
	return q
}

// to returns the packet with another destination.
func to(addr netip.Addr, p packet.Packet) packet.Packet {
	p = p.Clone()
	if p.IPv4 != nil {
		p.IPv4.Dst = addr
	} else {
		p.IPv6.Dst = addr
	}
	return p
}

// icmpScenes are about ICMP errors, which must be translated back, and about echo requests.
func icmpScenes(p *path, e ends) []scene {
	const SYN, ACK = packet.SYN, packet.ACK
	unreachable := e.message(packet.PortUnreachable, packet.PortUnreachable6)
	tooBig := e.message(packet.FragNeeded, packet.PacketTooBig6)
	expired := e.message(packet.TimeExceeded, packet.TimeExceeded6)

	// Both directions of a connection, by protocol.
	type packets struct{ toLocal, toHere, fromHere, fromLocal, toRemote, toThere, fromThere, fromRemote packet.Packet }
	ways := func(of func(src, dst netip.AddrPort) packet.Packet) packets {
		return packets{
			of(e.client, e.local), of(e.client, e.here), of(e.here, e.client), of(e.local, e.client),
			of(e.client, e.remote), of(e.nat, e.there), of(e.there, e.nat), of(e.remote, e.client),
		}
	}
	syn := func(src, dst netip.AddrPort) packet.Packet { return tcp(src, dst, SYN) }
	long := func(src, dst netip.AddrPort) packet.Packet { return sized(udp(src, dst), 400) }
	noSum := func(src, dst netip.AddrPort) packet.Packet {
		q := udp(src, dst)
		q.UDP.Checksum = new(uint16(0))
		return q
	}
	var scenes []scene
	for _, about := range []struct {
		name string
		packets
		keep int
	}{
		{"TCP", ways(syn), 0}, {"TCP, cut after 8 bytes", ways(syn), 8}, {"TCP, cut before its checksum", ways(syn), 16},
		{"UDP", ways(long), 0}, {"UDP, cut after 8 bytes", ways(long), 8}, {"UDP without checksum", ways(noSum), 0},
	} {
		w, keep := about.packets, about.keep
		local := step{in, w.toLocal, next, w.toHere, "FORWARD_LOCAL", nil}
		remote := step{in, w.toRemote, redirect, forwarded(w.toThere), "FORWARD_REMOTE", nil}
		scenes = append(scenes,
			scene{name: about.name + ", by a backend here", steps: []step{local,
				{out, quoting(e.here.Addr(), unreachable, 0, w.toHere, keep), next, quoting(e.local.Addr(), unreachable, 0, w.toLocal, keep), "FORWARD_ICMP", nil},
			}},
			scene{name: about.name + ", by this node about its own link", steps: []step{local,
				{out, quoting(e.nat.Addr(), tooBig, 1300, w.toHere, keep), next, quoting(e.local.Addr(), tooBig, 1300, w.toLocal, keep), "FORWARD_ICMP", nil},
			}},
			scene{name: about.name + ", on the way from a backend here", steps: []step{local,
				{in, quoting(e.router, tooBig, 1300, w.fromLocal, keep), next, to(e.here.Addr(), quoting(e.router, tooBig, 1300, w.fromHere, keep)), "FORWARD_ICMP", nil},
				{in, quoting(e.client.Addr(), unreachable, 0, w.fromLocal, keep), next, to(e.here.Addr(), quoting(e.client.Addr(), unreachable, 0, w.fromHere, keep)), "FORWARD_ICMP", nil},
			}},
			scene{name: about.name + ", by a backend elsewhere", steps: []step{remote,
				{in, quoting(e.there.Addr(), unreachable, 0, forwarded(w.toThere), keep), redirect,
					forwarded(quoting(e.remote.Addr(), unreachable, 0, forwarded(w.toRemote), keep)), "FORWARD_ICMP", nil},
			}},
			scene{name: about.name + ", on the way to a backend elsewhere", steps: []step{remote,
				{in, quoting(e.router, expired, 0, forwarded(w.toThere), keep), redirect,
					forwarded(quoting(e.remote.Addr(), expired, 0, forwarded(w.toRemote), keep)), "FORWARD_ICMP", nil},
			}},
			scene{name: about.name + ", on the way from a backend elsewhere", steps: []step{remote,
				{in, quoting(e.router, tooBig, 1300, w.fromRemote, keep), redirect,
					forwarded(to(e.there.Addr(), quoting(e.nat.Addr(), tooBig, 1300, w.fromThere, keep))), "FORWARD_ICMP", nil},
			}})
	}
	begun := step{in, tcp(e.client, e.local, SYN), next, tcp(e.client, e.here, SYN), "FORWARD_LOCAL", nil}
	redirected := quoting(e.router, e.message(5<<8, 137<<8), 0, tcp(e.local, e.client, ACK), 8)
	return append(scenes,
		scene{name: "about an unknown connection, or in the wrong place", steps: []step{
			{in, quoting(e.router, unreachable, 0, tcp(e.local, e.client, ACK), 0), next, same, "", nil},
			begun,
			{out, quoting(e.router, tooBig, 1300, tcp(e.local, e.client, ACK), 0), next, same, "", nil},
			{in, quoting(e.here.Addr(), unreachable, 0, tcp(e.client, e.here, SYN), 0), next, same, "", nil},
			{in, quoting(e.router, unreachable, 0, tcp(e.local, e.stranger, ACK), 0), next, same, "", nil},
			{in, quoting(e.router, unreachable, 0, tcp(e.local, e.client, ACK), 3), next, same, "", nil},
			{in, redirected, next, same, "", nil},
		}},
		scene{name: "errors do not live for ever, and that is not reported", steps: []step{
			{in, tcp(e.client, e.remote, SYN), redirect, forwarded(tcp(e.nat, e.there, SYN)), "FORWARD_REMOTE", nil},
			{in, withTTL(quoting(e.there.Addr(), unreachable, 0, tcp(e.nat, e.there, SYN), 0), 1), shot, same, "ERROR_TTL", nil},
		}},
		scene{name: "in fragments, which cannot be put together here", steps: append([]step{begun}, untouchedFor("PASS_FRAGMENT",
			quoting(e.router, tooBig, 1300, sized(udp(e.local, e.client), 500), 0).Fragments(200, 7)...)...)},
		scene{name: "echo", steps: []step{
			{in, packet.NewEcho(e.client.Addr(), e.balancer.Addr(), 7, 1, []byte("hello")), redirect,
				p.back(echoReply(e.balancer.Addr(), e.client.Addr(), 7, 1, []byte("hello"))), "ANSWER_ECHO", nil},
			{in, packet.NewEcho(e.client.Addr(), e.unserved.Addr(), 7, 1, nil), redirect,
				p.portUnreachable(e.unserved, packet.NewEcho(e.client.Addr(), e.unserved.Addr(), 7, 1, nil)), "REJECT", nil},
			{in, packet.NewEcho(e.client.Addr(), e.local.Addr(), 7, 1, nil), redirect,
				p.portUnreachable(e.local, packet.NewEcho(e.client.Addr(), e.local.Addr(), 7, 1, nil)), "REJECT", nil},
			{in, packet.NewEcho(e.client.Addr(), e.nat.Addr(), 7, 1, nil), next, same, "", nil},
			{in, packet.NewEcho(e.client.Addr(), e.here.Addr(), 7, 1, nil), next, same, "", nil},
			{out, packet.NewEcho(e.client.Addr(), e.balancer.Addr(), 7, 1, nil), next, same, "", nil},
		}})
}

func echoReply(src, dst netip.Addr, id, seq uint16, payload []byte) packet.Packet {
	q := packet.NewEcho(src, dst, id, seq, payload)
	q.ICMP.Type = packet.EchoReply >> 8
	if src.Is6() {
		q.ICMP.Type = packet.EchoReply6 >> 8
	}
	return q
}

// untouched are incoming packets that pass unchanged.
func untouched(list ...packet.Packet) []step { return untouchedFor("", list...) }

func untouchedFor(reason string, list ...packet.Packet) (steps []step) {
	for _, q := range list {
		steps = append(steps, step{in, q, next, same, reason, nil})
	}
	return steps
}
