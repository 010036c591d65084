// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/packet"
)

// wrapped is a frame whose IP packet is the payload of one between two addresses, as programs send it.
func (p *path) wrapped(frame []byte, from, to netip.Addr) []byte {
	protocol := uint8(unix.IPPROTO_IPIP)
	if from.Is6() {
		protocol = unix.IPPROTO_IPV6
	}
	return p.inPacket(from, to, protocol, frame[14:])
}

// inGeneve is likewise, with Geneve from a port in between.
func (p *path) inGeneve(frame []byte, from, to netip.Addr, port uint16) []byte {
	return p.inPacket(from, to, unix.IPPROTO_UDP, geneve(frame, port))
}

// withOption is a frame whose IP packet goes to an address instead, to the port of backends, and has an option with its destination.
func (p *path) withOption(frame []byte, to netip.Addr) []byte {
	q := packet.ParseIP(frame[14:])
	option := optionFor(q.Destination())
	if q.IPv4 != nil {
		q.IPv4.Dst, q.IPv4.Options = to, append(option, q.IPv4.Options...)
	} else {
		q.IPv6.Dst, q.IPv6.Extensions = to, append([]packet.Extension{{Type: packet.ProtoDestOptions, Data: option}}, q.IPv6.Extensions...)
	}
	if q.TCP != nil {
		q.TCP.Dst = 8080
	}
	if q.UDP != nil {
		q.UDP.Dst = 8080
	}
	return p.frame(q)
}

// optionFor is the option that names a frontend. The header of IPv6 is that of the extension.
func optionFor(frontend netip.AddrPort) []byte {
	a := frontend.Addr().AsSlice()
	if frontend.Addr().Is4() {
		slices.Reverse(a)
		return append(binary.LittleEndian.AppendUint16([]byte{lbmap.OptionV4, 8}, frontend.Port()), a...)
	}
	b := append([]byte{lbmap.OptionV6, lbmap.OptionV6Len}, a...)
	return append(binary.BigEndian.AppendUint16(b, frontend.Port()), 0, 0)
}

func (p *path) inPacket(from, to netip.Addr, protocol uint8, payload []byte) []byte {
	q := packet.NewProtocol(from, to, protocol, payload)
	if q.IPv4 != nil {
		q.IPv4.DontFragment = true
	}
	return p.frame(q)
}

// geneve is a UDP datagram with the IP packet of a frame.
func geneve(frame []byte, port uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, port)
	b = binary.BigEndian.AppendUint16(b, lbmap.GenevePort)
	b = binary.BigEndian.AppendUint16(b, uint16(len(frame)-14+16))
	b = append(b, 0, 0, 0, 0)
	b = append(b, frame[12:14]...)
	b = binary.BigEndian.AppendUint32(b, lbmap.GeneveVni<<8)
	return append(b, frame[14:]...)
}

var dispatches = map[string]lbmap.Dispatch{"ipip": lbmap.DispatchIPIP, "geneve": lbmap.DispatchGeneve, "opt": lbmap.DispatchOpt}

// TestPacketDirect: what comes in an IP packet is taken out only for frontends, connections and probes, and goes nowhere else; a backend on
// another node gets packets in IP packets once its node takes them.
func TestPacketDirect(t *testing.T) {
	for name, dispatch := range dispatches {
		t.Run(name, func(t *testing.T) { packetDirect(t, dispatch) })
	}
}

func packetDirect(t *testing.T, dispatch lbmap.Dispatch) {
	p := newPath(t, Options{Dispatch: dispatch})
	if err := p.resolve(); err != nil {
		t.Fatal(err)
	}
	const port = 50000
	wrapIn := func(dispatch lbmap.Dispatch, frame []byte, from, to netip.Addr) []byte {
		switch dispatch {
		case lbmap.DispatchGeneve:
			return p.inGeneve(frame, from, to, port)
		case lbmap.DispatchOpt:
			return p.withOption(frame, to)
		}
		return p.wrapped(frame, from, to)
	}
	wrap := func(frame []byte, from, to netip.Addr) []byte { return wrapIn(dispatch, frame, from, to) }
	// A program takes what comes in any form.
	other := func(frame []byte, from, to netip.Addr) []byte { return wrapIn((dispatch+1)%3, frame, from, to) }
	geneve, opt := dispatch == lbmap.DispatchGeneve, dispatch == lbmap.DispatchOpt
	policy := pathPolicy(p.at)
	policy.Forwarding = proxier.DSR
	p.UpdatePolicy(policy, func(*proxier.Facts) {})
	here, there := netip.MustParseAddrPort("10.96.0.10:80"), netip.MustParseAddrPort("10.96.0.11:80")
	remote := netip.MustParseAddr("10.244.2.7")
	expose := func(name string, vip netip.AddrPort, node string, backend netip.Addr) {
		p.OnServiceAdd(writertest.Service(name, vip.Addr().String()))
		s := writertest.Slice(name+"-4", name)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{backend.String()}, NodeName: &node})
		p.OnEndpointSliceAdd(s)
	}
	expose("here", here, p.at.Name, p.pod.Addr4)
	expose("there", there, p.node2.Name, remote)
	if err := p.sync(); err != nil {
		t.Fatal(err)
	}
	client, nodeA := netip.MustParseAddrPort("198.51.100.9:4000"), p.node2.Addr4
	backend := netip.AddrPortFrom(p.pod.Addr4, 8080)
	bare := func(q packet.Packet) []byte { return p.frame(q) }
	syn := bare(tcp(client, here, packet.SYN))
	echo := func(from, to netip.Addr) []byte {
		q := packet.NewEcho(from, to, 7, 1, []byte("cookie"))
		return bare(q)
	}
	// congested is a packet whose ends know ECN, and that a router between the nodes marked (RFC 6040).
	congested := func(q packet.Packet, mark uint8) []byte {
		q.IPv4.TOS = mark
		return bare(q)
	}
	marked := wrap(congested(tcp(netip.MustParseAddrPort("198.51.100.9:4006"), here, packet.SYN), 2), nodeA, p.pod.Addr4)
	marked[14+1] |= 3
	if opt { // there is no outer header
		marked = wrap(congested(tcp(netip.MustParseAddrPort("198.51.100.9:4006"), here, packet.SYN), 3), nodeA, p.pod.Addr4)
	}
	unreachable := bare(p.icmp(netip.AddrPortFrom(client.Addr(), 0), packet.PortUnreachable, 0, tcp(netip.MustParseAddrPort("192.0.2.1:5"), client, packet.ACK)))
	// Who sent an option is not known. A probe with one is answered to its sender, if that is a node or no node is known.
	elsewhere, answer := int32(shot), "DROP_NO_TARGET"
	unknown, served := int32(next), "FORWARD_LOCAL"
	if opt {
		elsewhere, answer = redirect, "ANSWER_ECHO"
		unknown, served = shot, "DROP_NO_TARGET" // later segments would have no option
	}
	for _, c := range []struct {
		name    string
		frame   []byte
		verdict int32
		want    []byte // nil for any
		reason  string
	}{
		{"a request", wrap(syn, nodeA, p.pod.Addr4), next, bare(tcp(client, backend, packet.SYN)), "FORWARD_LOCAL"},
		{"more of the connection", wrap(bare(tcp(client, here, packet.ACK)), nodeA, p.pod.Addr4), next, bare(tcp(client, backend, packet.ACK)), "FORWARD_LOCAL"},
		{"for a backend that is not known", wrap(bare(tcp(netip.MustParseAddrPort("198.51.100.9:4001"), here, packet.SYN)), nodeA, netip.MustParseAddr("10.244.1.99")), unknown, nil, served},
		{"to no frontend", wrap(bare(tcp(netip.MustParseAddrPort("198.51.100.9:4003"), netip.MustParseAddrPort("192.0.2.1:80"), packet.SYN)), nodeA, p.pod.Addr4), next, nil, ""},
		{"wrapped twice", wrap(wrap(bare(tcp(netip.MustParseAddrPort("198.51.100.9:4004"), here, packet.SYN)), nodeA, p.pod.Addr4), nodeA, p.pod.Addr4), next, nil, ""},
		{"in the other form", other(bare(tcp(netip.MustParseAddrPort("198.51.100.9:4002"), here, packet.SYN)), nodeA, p.pod.Addr4), next, bare(tcp(netip.MustParseAddrPort("198.51.100.9:4002"), backend, packet.SYN)), "FORWARD_LOCAL"},
		{"truncated", wrap(syn[:14+20], nodeA, p.pod.Addr4), next, nil, ""},
		{"a mark of congestion", marked, next, congested(tcp(netip.MustParseAddrPort("198.51.100.9:4006"), backend, packet.SYN), 3), "FORWARD_LOCAL"},
		{"a reset of no connection", wrap(bare(tcp(netip.MustParseAddrPort("198.51.100.9:4007"), here, packet.RST)), nodeA, p.pod.Addr4), shot, nil, "DROP_NO_TARGET"},
		{"a probe", wrap(echo(nodeA, p.pod.Addr4), nodeA, p.pod.Addr4), redirect, nil, "ANSWER_ECHO"},
		{"a probe with another address", wrap(echo(client.Addr(), p.pod.Addr4), nodeA, p.pod.Addr4), elsewhere, nil, answer},
		{"an echo request to elsewhere", wrap(echo(nodeA, client.Addr()), nodeA, p.pod.Addr4), shot, nil, "DROP_NO_TARGET"},
		{"an error about no connection", wrap(unreachable, nodeA, p.pod.Addr4), shot, nil, "DROP_NO_TARGET"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before, err := p.reasons()
			if err != nil {
				t.Fatal(err)
			}
			err = p.at.Do(func() error {
				got, err := p.run(in, c.frame)
				if err != nil {
					return err
				}
				if got.Verdict != c.verdict {
					return fmt.Errorf("verdict %d, want %d", got.Verdict, c.verdict)
				}
				want := c.want
				if want == nil && c.verdict == next && c.reason == "" {
					want = c.frame // unmodified
				}
				if want != nil && !bytes.Equal(got.Frame, want) {
					return fmt.Errorf("the result is\n%s\nwant\n%s", packet.Parse(got.Frame), packet.Parse(want))
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			after, err := p.reasons()
			if err != nil {
				t.Fatal(err)
			}
			if c.reason != "" && after[c.reason] == before[c.reason] {
				t.Errorf("not counted as %s", c.reason)
			}
			if unwrapped := after["UNWRAP"] > before["UNWRAP"]; unwrapped != (c.reason != "") {
				t.Errorf("taken out: %v", unwrapped)
			}
		})
	}

	// Other datagrams to Geneve's port.
	for name, damage := range map[string]func([]byte){
		"another VNI":      func(b []byte) { b[14]++ },
		"options":          func(b []byte) { b[8] = 1 },
		"another version":  func(b []byte) { b[8] = 0x40 },
		"a frame":          func(b []byte) { copy(b[10:], []byte{0x65, 0x58}) },
		"the other family": func(b []byte) { copy(b[10:], []byte{0x86, 0xdd}) },
		"another port":     func(b []byte) { b[3]++ },
	} {
		from := netip.AddrPortFrom(client.Addr(), 4500)
		frame := p.inGeneve(bare(tcp(from, here, packet.SYN)), nodeA, p.pod.Addr4, port)
		damage(frame[14+20:])
		err := p.at.Do(func() error {
			got, err := p.run(in, frame)
			if err == nil && (got.Verdict != next || !bytes.Equal(got.Frame, frame)) {
				return fmt.Errorf("verdict %d, %x", got.Verdict, got.Frame)
			}
			return err
		})
		if err != nil {
			t.Errorf("Geneve with %s is not left alone: %v", name, err)
		}
	}

	// From hosts that are no nodes, once nodes are known. Packets with an option are from clients.
	cluster := proxier.Cluster{Nodes: []netip.Addr{nodeA, p.node2.Addr6}, Pods: []netip.Prefix{netip.MustParsePrefix("100.64.7.0/24")}}
	if err := p.tier.SetCluster(cluster); err != nil {
		t.Fatal(err)
	}
	for i, from := range []netip.Addr{nodeA, client.Addr(), p.pod.Addr4} {
		frame := wrap(bare(tcp(netip.AddrPortFrom(client.Addr(), uint16(6000+i)), here, packet.SYN)), from, p.pod.Addr4)
		var taken bool
		err := p.at.Do(func() error {
			got, err := p.run(in, frame)
			taken = err == nil && !bytes.Equal(got.Frame, frame)
			return err
		})
		if err != nil || taken != (from == nodeA || opt) {
			t.Errorf("from %s: taken out %v, error %v", from, taken, err)
		}
	}

	// To a backend on another node, before and after its node answers probes. Each flow has a source port of its own in Geneve.
	ports := map[uint16]bool{}
	for i, ready := range []bool{false, true, true, true} {
		if ready {
			p.tier.writer.SetDirect(map[netip.Addr]struct{}{remote: {}})
		}
		from := netip.AddrPortFrom(client.Addr(), uint16(5000+i))
		for range 2 { // the second packet is of an established flow
			got, err := p.ask(in, tcp(from, there, packet.SYN))
			if err != nil {
				t.Fatal(err)
			}
			want := wrap(bare(forwarded(tcp(from, there, packet.SYN))), p.at.Addr4, remote)
			if geneve && ready {
				at := got.Frame[14+20:][:2]
				ports[binary.BigEndian.Uint16(at)] = true
				copy(want[14+20:], at)
			}
			if got.Verdict != redirect || bytes.Equal(got.Frame, want) != ready {
				t.Errorf("ready %v: verdict %d\n%x\nwant\n%x", ready, got.Verdict, got.Frame, want)
			}
		}
	}
	if geneve && len(ports) != 3 || ports[port] {
		t.Errorf("three flows have the source ports %v", ports)
	}
	for n := range ports {
		if n < lbmap.GeneveFirstSport {
			t.Errorf("source port %d is no ephemeral one", n)
		}
	}
	// Padding of a short frame is not sent as payload.
	padded := tcp(netip.AddrPortFrom(client.Addr(), 5002), there, packet.ACK)
	padded.Trailer = make([]byte, 6)
	got, err := p.ask(in, padded)
	if size := int(binary.BigEndian.Uint16(got.Frame[14+2:])); err != nil || size != len(got.Frame)-14-6 {
		t.Errorf("a padded frame of %d bytes is sent in one of %d, whose packet has %d: %v", len(p.frame(padded)), len(got.Frame), size, err)
	}
	// The client comes by another node meanwhile, which sends its packets here: they do not go on to a third one so. Those with an option
	// could not reach one backend by two ways.
	sender := p.at.Addr4
	if opt {
		sender = there.Addr() // a reset
	}
	moved := tcp(netip.AddrPortFrom(client.Addr(), 5003), there, packet.ACK)
	err = p.at.Do(func() error {
		q := packet.NewError(client.Addr(), packet.PortUnreachable, 0, tcp(there, netip.AddrPortFrom(client.Addr(), 5003), packet.ACK))
		dropped, err := p.run(in, wrap(bare(q), nodeA, p.pod.Addr4))
		if err == nil {
			got, err = p.run(in, wrap(bare(moved), nodeA, p.pod.Addr4))
		}
		if dropped.Verdict != shot {
			return fmt.Errorf("an ICMP error has verdict %d", dropped.Verdict)
		}
		return err
	})
	if q := packet.Parse(got.Frame); err != nil || got.Verdict != redirect || q.TCP == nil || q.Source().Addr() != sender || opt != (q.TCP.Flags&packet.RST != 0) {
		t.Errorf("a packet of another node for a connection to a third one: verdict %d, error %v\n%s", got.Verdict, err, q)
	}

	// Routers between the nodes tell this node that a packet is too big, or has no way. It tells the client, by its own packet. Of packets
	// with an option, they tell the client.
	if !opt {
		p.packetDirectErrors(t, client, here, there, remote, map[bool]uint32{false: 20, true: 36}[geneve], func(q packet.Packet, to netip.Addr) packet.Packet {
			return packet.ParseIP(wrap(bare(q), p.at.Addr4, to)[14:])
		})
	}
	// Clients of the cluster may be on the backend's node: they are masqueraded.
	for _, from := range []string{nodeA.String(), "100.64.7.9", "10.244.2.9"} {
		got, err := p.ask(in, tcp(netip.AddrPortFrom(netip.MustParseAddr(from), 5002), there, packet.SYN))
		if err != nil || got.Verdict != redirect || !bytes.Contains(got.Frame, p.at.Addr4.AsSlice()) || bytes.Contains(got.Frame, netip.MustParseAddr(from).AsSlice()) {
			t.Errorf("from %s: verdict %d, error %v\n%x", from, got.Verdict, err, got.Frame)
		}
	}
	if peers := p.tier.writer.DirectPeers(); len(peers) != 1 || peers[0] != remote {
		t.Errorf("peers %v", peers)
	}
}

// packetDirectErrors has a router tell about packets of client to there, whose backend is remote. wrap puts one into another to an
// address.
func (p *path) packetDirectErrors(t *testing.T, client, here, there netip.AddrPort, remote netip.Addr, overhead uint32, wrap func(q packet.Packet, to netip.Addr) packet.Packet) {
	t.Helper()
	from := netip.AddrPortFrom(client.Addr(), 5002)
	sent := tcp(from, there, packet.ACK)
	outer, router := wrap(forwarded(sent), remote), netip.MustParseAddr("192.0.2.254")
	for _, c := range []struct {
		name    string
		error   packet.Packet
		verdict int32
		message uint16
		info    uint32
		reason  string
	}{
		{"too big", packet.NewError(router, packet.FragNeeded, 1400, outer), redirect, packet.FragNeeded, 1400 - overhead, "ERROR_TOO_BIG"},
		{"no way", packet.NewError(router, packet.HostUnreachable, 0, outer), redirect, packet.HostUnreachable, 0, "FORWARD_ICMP"},
		{"an impossible MTU", packet.NewError(router, packet.FragNeeded, 20, outer), shot, 0, 0, ""},
		{"of the backend's node", packet.NewError(remote, packet.PortUnreachable, 0, outer), next, 0, 0, ""},
		{"to another backend", packet.NewError(router, packet.FragNeeded, 1400, wrap(forwarded(sent), client.Addr())), next, 0, 0, ""},
		{"of no connection", packet.NewError(router, packet.FragNeeded, 1400, wrap(tcp(from, here, packet.ACK), remote)), next, 0, 0, ""},
	} {
		before, err := p.reasons()
		if err != nil {
			t.Fatal(err)
		}
		got, err := p.ask(in, c.error)
		if err != nil {
			t.Fatal(err)
		}
		want := p.frame(c.error)
		if c.message != 0 {
			q := p.icmp(there, c.message, c.info, forwarded(sent))
			q.Ethernet = nil
			want = p.frame(q)
		}
		if got.Verdict != c.verdict || c.verdict != shot && !bytes.Equal(got.Frame, want) {
			t.Errorf("an error of a router, %s: verdict %d\n%s\nwant verdict %d\n%s", c.name, got.Verdict, packet.Parse(got.Frame), c.verdict, packet.Parse(want))
		}
		after, err := p.reasons()
		if err != nil {
			t.Fatal(err)
		}
		if c.reason != "" && after[c.reason] == before[c.reason] {
			t.Errorf("an error of a router, %s: not counted as %s", c.name, c.reason)
		}
	}
}
