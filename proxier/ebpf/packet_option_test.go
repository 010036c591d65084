// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// optionPath is a path with direct server return by IP options, and addresses of one family.
type optionPath struct {
	*path
	client netip.AddrPort
	nodeA  netip.Addr
	// here and there are frontends with a backend on this node and on another one, other is one of another Service, and ranged one that
	// admits none of the clients.
	here, there, other, ranged netip.AddrPort
	backend, remote            netip.AddrPort
}

// four is the address of a frontend of IPv4, whatever the family.
var four = netip.MustParseAddr("10.96.0.99")

// newOptionPath is for one of the families.
func newOptionPath(t *testing.T, six bool) *optionPath {
	o := &optionPath{path: newPath(t, Options{Dispatch: lbmap.DispatchOpt})}
	if err := o.resolve(); err != nil {
		t.Fatal(err)
	}
	policy := pathPolicy(o.at)
	policy.Forwarding = proxier.DSR
	o.UpdatePolicy(policy, func(*proxier.Facts) {})
	pod, remote, vip := o.pod.Addr4, netip.MustParseAddr("10.244.2.7"), "10.96.0.%d"
	o.client, o.nodeA = netip.MustParseAddrPort("198.51.100.9:4000"), o.node2.Addr4
	family := discoveryv1.AddressTypeIPv4
	if six {
		pod, remote, vip = o.pod.Addr6, netip.MustParseAddr("fd00:10:244:2::7"), "fd00:10:96::%d"
		o.client, o.nodeA = netip.MustParseAddrPort("[2001:db8::9]:4000"), o.node2.Addr6
		family = discoveryv1.AddressTypeIPv6
	}
	o.backend, o.remote = netip.AddrPortFrom(pod, 8080), netip.AddrPortFrom(remote, 8080)
	expose := func(n int, node string, backend netip.Addr, change ...func(*v1.Service)) netip.AddrPort {
		name, addr := fmt.Sprintf("s%d", n), fmt.Sprintf(vip, n)
		o.OnServiceAdd(writertest.Service(name, addr, append(change, func(s *v1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "u", Port: 80, Protocol: v1.ProtocolUDP})
		})...))
		s := writertest.Slice(name+"-x", name)
		s.AddressType = family
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: new("u"), Port: new(int32(8080)), Protocol: new(v1.ProtocolUDP)})
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{backend.String()}, NodeName: &node})
		o.OnEndpointSliceAdd(s)
		return netip.AddrPortFrom(netip.MustParseAddr(addr), 80)
	}
	o.here = expose(10, o.at.Name, pod, func(s *v1.Service) {
		s.Spec.Type, s.Spec.Ports[0].NodePort = v1.ServiceTypeNodePort, 30080
	})
	o.there = expose(11, o.node2.Name, remote)
	o.other = expose(12, o.at.Name, o.at.Addr4)
	if six {
		o.other = expose(12, o.at.Name, o.at.Addr6)
	}
	lb := netip.MustParseAddr(map[bool]string{false: "203.0.113.13", true: "2001:db8:1::13"}[six])
	expose(13, o.at.Name, pod, func(s *v1.Service) {
		s.Spec.Type, s.Spec.LoadBalancerSourceRanges = v1.ServiceTypeLoadBalancer, []string{"192.0.2.77/32", "2001:db8:77::/64"}
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: lb.String()}}
	})
	o.ranged = netip.AddrPortFrom(lb, 80)
	o.OnServiceAdd(writertest.Service("four", four.String()))
	o.OnEndpointSliceAdd(writertest.Slice("four-x", "four", o.pod.Addr4.String()))
	if err := o.sync(); err != nil {
		t.Fatal(err)
	}
	o.tier.writer.SetDirect(map[netip.Addr]struct{}{remote: {}})
	if err := o.tier.SetCluster(proxier.Cluster{Nodes: []netip.Addr{o.nodeA}}); err != nil {
		t.Fatal(err)
	}
	return o
}

// with is a packet to a backend that has an option with its destination.
func (o *optionPath) with(q packet.Packet, backend netip.Addr) packet.Packet {
	q = packet.Parse(o.withOption(o.frame(q), backend))
	q.Ethernet = nil
	return q
}

// expect runs a packet, and checks the verdict, the packet that comes of it, and by which reason it is counted.
func (o *optionPath) expect(t *testing.T, what string, h datapath.Hook, q packet.Packet, verdict int32, want packet.Packet, reason string) {
	t.Helper()
	before, err := o.reasons()
	if err != nil {
		t.Fatal(err)
	}
	got, err := o.ask(h, q)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if got.Verdict != verdict || verdict != shot && !bytes.Equal(got.Frame, o.frame(want)) {
		t.Errorf("%s: verdict %d, want %d\n%s\nwant\n%s", what, got.Verdict, verdict, packet.Parse(got.Frame), want)
	}
	after, err := o.reasons()
	if err != nil {
		t.Fatal(err)
	}
	if reason != "" && after[reason] != before[reason]+1 {
		t.Errorf("%s: not counted as %s: %v", what, reason, after)
	}
}

func eachFamily(t *testing.T, test func(t *testing.T, o *optionPath)) {
	for name, six := range map[string]bool{"IPv4": false, "IPv6": true} {
		t.Run(name, func(t *testing.T) { test(t, newOptionPath(t, six)) })
	}
}

// TestOptionFormat: the bytes of options, which other nodes have to understand.
func TestOptionFormat(t *testing.T) {
	eachFamily(t, func(t *testing.T, o *optionPath) {
		got, err := o.ask(in, tcp(o.client, o.there, packet.SYN))
		if err != nil {
			t.Fatal(err)
		}
		header, want := 14+20, "9a 08 50 00 0b 00 60 0a"
		if o.there.Addr().Is6() {
			header, want = 14+40, "06 02 1b 14 fd 00 00 10 00 96 00 00 00 00 00 00 00 00 00 11 00 50 00 00"
		}
		want = strings.ReplaceAll(want, " ", "")
		if option := hex.EncodeToString(got.Frame[header : header+len(want)/2]); option != want {
			t.Errorf("the option is %s, want %s", option, want)
		}
		if err := packet.Parse(got.Frame).Verify(); err != nil {
			t.Error(err)
		}
	})
}

// TestOptionSent: packets that the backend's node may not know have an option, others of a connection do not.
func TestOptionSent(t *testing.T) {
	eachFamily(t, func(t *testing.T, o *optionPath) {
		sent := func(what string, q packet.Packet, has bool) {
			t.Helper()
			want := o.with(forwarded(q), o.remote.Addr())
			if !has {
				want = withoutOption(want)
			}
			o.expect(t, what, in, q, redirect, want, "FORWARD_DIRECT")
		}
		ack := tcp(o.client, o.there, packet.ACK)
		sent("a SYN", tcp(o.client, o.there, packet.SYN), true)
		sent("a SYN again", tcp(o.client, o.there, packet.SYN), true)
		sent("an ACK", ack, false)
		sent("a FIN", tcp(o.client, o.there, packet.ACK|packet.FIN), false)
		for i := range o.flows {
			if lbmap.FlowStage(o.flows[i].Life) >= lbmap.FlowYoung {
				o.age(uint32(i), lbmap.OptionAfterS)
			}
		}
		sent("an ACK after a pause", ack, true)
		sent("an ACK after that", ack, false)
		moved := netip.AddrPortFrom(o.client.Addr(), 4001)
		sent("an ACK of a connection that moves here", tcp(moved, o.there, packet.ACK), true)
		sent("an ACK after that", tcp(moved, o.there, packet.ACK), false)
		for range 2 {
			sent("a datagram", udp(o.client, o.there), true)
		}
		whole := sized(udp(o.client, o.there), 1200)
		translated := withoutOption(o.with(forwarded(whole), o.remote.Addr())).Fragments(400, 7)
		for i, part := range whole.Fragments(400, 7) {
			want := translated[i].Clone()
			addOption(&want, o.there)
			o.expect(t, fmt.Sprintf("fragment %d", i), in, part, redirect, want, "FORWARD_DIRECT")
		}
		// Errors about what the backend sent have one too.
		reply := tcp(o.there, o.client, packet.ACK)
		about := packet.NewError(o.client.Addr(), packet.PortUnreachable, 0, reply)
		o.expect(t, "an ICMP error", in, about, redirect, o.with(forwarded(about), o.remote.Addr()), "FORWARD_ICMP")
		// Without room for an option, or a place where it may stand, a packet that needs one is dropped.
		full := tcp(netip.AddrPortFrom(o.client.Addr(), 4002), o.there, packet.SYN)
		if full.IPv4 != nil {
			full.IPv4.Options = bytes.Repeat([]byte{1}, 36)
		} else {
			full.IPv6.Extensions = []packet.Extension{{Type: packet.ProtoHopByHop, Data: []byte{1, 4, 0, 0, 0, 0}}}
		}
		o.expect(t, "no room", in, full, shot, full, "DROP_REWRITE")
	})
}

// withoutOption is a packet without the first option.
func withoutOption(q packet.Packet) packet.Packet {
	q = q.Clone()
	if q.IPv4 != nil {
		q.IPv4.Options = q.IPv4.Options[8:]
	} else {
		q.IPv6.Extensions = q.IPv6.Extensions[1:]
	}
	return q
}

func addOption(q *packet.Packet, frontend netip.AddrPort) {
	if q.IPv4 != nil {
		q.IPv4.Options = append(optionFor(frontend), q.IPv4.Options...)
	} else {
		q.IPv6.Extensions = append([]packet.Extension{{Type: packet.ProtoDestOptions, Data: optionFor(frontend)}}, q.IPv6.Extensions...)
	}
}

// TestOptionTaken: the backend's node takes options off, and its flow knows of segments without one.
func TestOptionTaken(t *testing.T) {
	eachFamily(t, func(t *testing.T, o *optionPath) {
		taken := func(what string, q, want packet.Packet) {
			t.Helper()
			o.expect(t, what, in, o.with(q, o.backend.Addr()), next, want, "UNWRAP")
		}
		bare := func(what string, flags packet.Flags, reason string) {
			t.Helper()
			q := tcp(o.client, o.backend, flags)
			o.expect(t, what, in, q, next, q, reason)
		}
		bare("a segment of no connection", packet.ACK, "")
		taken("a SYN", tcp(o.client, o.here, packet.SYN), tcp(o.client, o.backend, packet.SYN))
		answer := tcp(o.backend, o.client, packet.SYN|packet.ACK)
		answer.TCP.Options = []byte{2, 4, 1460 >> 8, 1460 & 0xff}
		lowered := tcp(o.here, o.client, packet.SYN|packet.ACK)
		mss := uint16(1460 - 8)
		if o.here.Addr().Is6() {
			mss = 1460 - 24
		}
		lowered.TCP.Options = []byte{2, 4, byte(mss >> 8), byte(mss)}
		o.expect(t, "the SYN-ACK", out, answer, next, lowered, "FORWARD_REPLY")
		flow := func() *lbmap.Flow {
			for i := range o.flows {
				if lbmap.FlowStage(o.flows[i].Life) >= lbmap.FlowYoung && o.flows[i].Request.Proto == packet.ProtoTCP {
					return &o.flows[i]
				}
			}
			t.Fatal("there is no flow")
			return nil
		}
		if f := flow(); f.Flags&lbmap.FlowOption == 0 || f.Flags&lbmap.FlowEstablished != 0 {
			t.Errorf("after the SYN-ACK, the flow has the flags %#x", uint32(f.Flags))
		}
		bare("an ACK", packet.ACK, "FORWARD_LOCAL")
		if f := flow(); f.Flags&lbmap.FlowEstablished == 0 || lbmap.FlowStage(f.Life) != lbmap.FlowKept {
			t.Errorf("after an ACK, the flow has the flags %#x, stage %d", uint32(f.Flags), lbmap.FlowStage(f.Life))
		}
		taken("an ACK with an option", tcp(o.client, o.here, packet.ACK), tcp(o.client, o.backend, packet.ACK))
		bare("a FIN", packet.ACK|packet.FIN, "FORWARD_LOCAL")
		if f := flow(); f.Flags&lbmap.FlowFINRequest == 0 {
			t.Errorf("after a FIN, the flow has the flags %#x", uint32(f.Flags))
		}
		for range 2 {
			taken("a datagram", udp(o.client, o.here), udp(o.client, o.backend))
		}
		whole, translated := sized(udp(o.client, o.here), 1200).Fragments(400, 7), sized(udp(o.client, o.backend), 1200).Fragments(400, 7)
		parts := slices.Clone(translated)
		for i := range parts {
			parts[i] = parts[i].Clone()
			addOption(&parts[i], o.here)
			o.expect(t, fmt.Sprintf("fragment %d of %d", i, len(whole)), in, parts[i], next, translated[i], "UNWRAP")
		}
		// An error of a router about a reply.
		about := packet.NewError(o.client.Addr(), packet.PortUnreachable, 0, udp(o.here, o.client))
		want := packet.NewError(o.client.Addr(), packet.PortUnreachable, 0, udp(o.backend, o.client))
		taken("an ICMP error", about, want)
		// A client's own options stay.
		own := udp(o.client, o.here)
		arrives := udp(o.client, o.backend)
		for _, q := range []*packet.Packet{&own, &arrives} {
			if q.IPv4 != nil {
				q.IPv4.Options = []byte{0x94, 4, 0, 0}
			} else {
				q.IPv6.Extensions = []packet.Extension{{Type: packet.ProtoDestOptions, Data: []byte{1, 4, 0, 0, 0, 0}}}
			}
		}
		taken("with an option of the client", own, arrives)
	})
}

// TestOptionOnePort: a segment without an option does not say which frontend it is for, so a second connection with the source port of
// another one to the same backend is reset, until that has ended. Datagrams do say so.
func TestOptionOnePort(t *testing.T) {
	eachFamily(t, func(t *testing.T, o *optionPath) {
		nodePort := netip.AddrPortFrom(o.nodeA, 30080)
		begin := func(to netip.AddrPort) packet.Packet { return o.with(tcp(o.client, to, packet.SYN), o.backend.Addr()) }
		begun := tcp(o.client, o.backend, packet.SYN)
		o.expect(t, "a connection", in, begin(o.here), next, begun, "FORWARD_LOCAL")
		got, err := o.ask(in, begin(nodePort))
		if q := packet.Parse(got.Frame); err != nil || got.Verdict != redirect || q.TCP == nil || q.Source() != nodePort || q.Destination() != o.client || q.TCP.Flags&packet.RST == 0 {
			t.Errorf("a second one: verdict %d, %v, %s", got.Verdict, err, q)
		}
		// One past the Service is left alone too.
		o.expect(t, "to the backend itself", in, begun, next, begun, "")
		ack := tcp(o.client, o.backend, packet.ACK)
		o.expect(t, "the first one goes on", in, ack, next, ack, "FORWARD_LOCAL")
		over := tcp(o.client, o.backend, packet.ACK|packet.RST)
		o.expect(t, "its reset", in, over, next, over, "FORWARD_LOCAL")
		o.expect(t, "a second one after that", in, begin(nodePort), next, begun, "FORWARD_LOCAL")
		o.expect(t, "its next segment", in, ack, next, ack, "FORWARD_LOCAL")
	})
}

// TestOptionDisagreement: nodes that select different backends for a connection, or know of different ones, break it at once, as later
// segments would not reach the backend of the first one. A retransmitted SYN may find that they agree.
func TestOptionDisagreement(t *testing.T) {
	eachFamily(t, func(t *testing.T, o *optionPath) {
		resets := func(what string, q packet.Packet, backend netip.Addr) {
			t.Helper()
			got, err := o.ask(in, o.with(q, backend))
			if r := packet.Parse(got.Frame); err != nil || got.Verdict != redirect || r.TCP == nil || r.Source() != q.Destination() || r.Destination() != q.Source() || r.TCP.Flags&packet.RST == 0 {
				t.Errorf("%s is not reset: verdict %d, %v, %s", what, got.Verdict, err, r)
			}
		}
		o.expect(t, "a connection", in, o.with(tcp(o.client, o.here, packet.SYN), o.backend.Addr()), next, tcp(o.client, o.backend, packet.SYN), "FORWARD_LOCAL")
		resets("a segment for another backend", tcp(o.client, o.here, packet.ACK), o.remote.Addr())
		ack := tcp(o.client, o.backend, packet.ACK)
		o.expect(t, "the connection", in, ack, next, ack, "FORWARD_LOCAL")
		// The other node knows the backend by another port.
		toPort := func(q packet.Packet, port uint16) packet.Packet {
			q = o.with(q, o.backend.Addr())
			q.TCP.Dst = port
			return q
		}
		late := netip.AddrPortFrom(o.client.Addr(), 4001)
		q := toPort(tcp(late, o.here, packet.SYN), 8081)
		o.expect(t, "a SYN for another port of the backend", in, q, shot, q, "DROP_NO_TARGET")
		q = toPort(tcp(o.client, o.here, packet.ACK), 8081)
		if got, err := o.ask(in, q); err != nil || got.Verdict != redirect {
			t.Errorf("a segment for another port of the backend is not reset: verdict %d, %v", got.Verdict, err)
		}
		q = o.with(tcp(late, o.here, packet.SYN), o.remote.Addr())
		o.expect(t, "a SYN for a backend that is not known", in, q, shot, q, "DROP_NO_TARGET")
		resets("a segment for a backend that is not known", tcp(late, o.here, packet.ACK), o.remote.Addr())
		o.expect(t, "a datagram for a backend that is not known", in, o.with(udp(late, o.here), o.remote.Addr()), next, udp(late, o.backend), "FORWARD_LOCAL")
	})
}

// TestOptionForged: whatever an option says, a sender gets no more by it than by a packet to the address that it has.
func TestOptionForged(t *testing.T) {
	eachFamily(t, func(t *testing.T, o *optionPath) {
		port := uint16(5000)
		another := func() netip.AddrPort { port++; return netip.AddrPortFrom(o.client.Addr(), port) }
		// left is for packets that stay as they are.
		left := func(what string, q packet.Packet) {
			t.Helper()
			before, _ := o.reasons()
			o.expect(t, what, in, q, next, q, "")
			if after, _ := o.reasons(); after["UNWRAP"] != before["UNWRAP"] {
				t.Errorf("%s: an option was taken", what)
			}
		}
		nowhere := netip.AddrPortFrom(netip.MustParseAddr(map[bool]string{false: "192.0.2.50", true: "2001:db8:50::1"}[o.here.Addr().Is6()]), 80)
		syn := func(to netip.AddrPort) packet.Packet { return tcp(another(), to, packet.SYN) }
		left("an address that is no frontend", o.with(syn(nowhere), o.backend.Addr()))
		left("a port that is no frontend", o.with(syn(netip.AddrPortFrom(o.here.Addr(), 81)), o.backend.Addr()))
		left("a NodePort of an address that is no node", o.with(syn(netip.AddrPortFrom(nowhere.Addr(), 30080)), o.backend.Addr()))
		unspecified := map[bool]netip.Addr{false: netip.IPv4Unspecified(), true: netip.IPv6Unspecified()}[o.here.Addr().Is6()]
		left("a NodePort of the unspecified address", o.with(syn(netip.AddrPortFrom(unspecified, 30080)), o.backend.Addr()))
		left("two options", o.with(o.with(syn(o.here), o.backend.Addr()), o.backend.Addr()))
		q := syn(netip.AddrPortFrom(o.nodeA, 30080))
		o.expect(t, "a NodePort of another node", in, o.with(q, o.backend.Addr()), next, tcp(q.Source(), o.backend, packet.SYN), "FORWARD_LOCAL")
		// To the frontend of a Service of which that is no backend: of UDP, to one that is.
		q = udp(another(), o.other)
		got, err := o.ask(in, o.with(q, o.backend.Addr()))
		if err != nil {
			t.Fatal(err)
		}
		plain, err := o.ask(in, q)
		if err != nil || got.Verdict != plain.Verdict || !bytes.Equal(got.Frame, plain.Frame) || packet.Parse(got.Frame).Destination().Addr() == o.backend.Addr() {
			t.Errorf("to a frontend of another Service: verdict %d, %s; without an option %d, %s", got.Verdict, packet.Parse(got.Frame), plain.Verdict, packet.Parse(plain.Frame))
		}
		q = o.with(syn(o.other), o.backend.Addr())
		o.expect(t, "a SYN to a frontend of another Service", in, q, shot, q, "DROP_NO_TARGET")
		q = o.with(syn(o.ranged), o.backend.Addr())
		o.expect(t, "from outside the source ranges", in, q, shot, q, "DROP_SOURCE_RANGE")
		// A probe of a host that is no node, and one to another address.
		for _, from := range []netip.Addr{o.client.Addr(), unspecified} {
			q = o.with(packet.NewEcho(from, o.backend.Addr(), 7, 1, []byte("cookie")), o.backend.Addr())
			o.expect(t, fmt.Sprintf("a probe of %s", from), in, q, shot, q, "DROP_NO_TARGET")
		}
		// Damaged options.
		for name, damage := range map[string]func(option []byte){
			"another type":   func(b []byte) { b[0]++ },
			"another length": func(b []byte) { b[1]-- },
		} {
			q := syn(o.here)
			q = o.with(q, o.backend.Addr())
			if q.IPv4 != nil {
				damage(q.IPv4.Options)
			} else {
				damage(q.IPv6.Extensions[0].Data)
			}
			left(name, q)
		}
		q = o.with(syn(o.here), o.backend.Addr())
		if q.IPv4 != nil {
			q.IPv4.Options = q.IPv4.Options[:4]
		} else {
			q.IPv6.Extensions[0].Data = q.IPv6.Extensions[0].Data[:14]
		}
		left("a truncated option", q)
		if o.here.Addr().Is6() {
			q := o.with(syn(o.here), o.backend.Addr())
			a := four.As16()
			copy(q.IPv6.Extensions[0].Data[2:], a[:])
			left("an IPv4 address", q)
		}
		// The first fragment was not seen.
		later := sized(udp(o.client, o.backend), 1200).Fragments(400, 99)[1]
		addOption(&later, o.here)
		left("a later fragment alone", later)
	})
}

// TestOptionProbe: a probe with an option is answered by another number, as a system that does not know the option would answer too.
func TestOptionProbe(t *testing.T) {
	eachFamily(t, func(t *testing.T, o *optionPath) {
		echo := packet.NewEcho(o.nodeA, o.backend.Addr(), 7, 1, []byte("cookie"))
		got, err := o.ask(in, o.with(echo, o.backend.Addr()))
		if err != nil {
			t.Fatal(err)
		}
		q := packet.Parse(got.Frame)
		if got.Verdict != redirect || q.ICMP == nil || q.Source().Addr() != o.backend.Addr() || q.Destination().Addr() != o.nodeA || q.ICMP.Rest != 7<<16|0xfffe {
			t.Errorf("verdict %d, %s", got.Verdict, q)
		}
		if err := q.Verify(); err != nil {
			t.Error(err)
		}
	})
}

// TestOptionDeviceSum: the checksum that a device computed of the whole packet is right without the option, and with it.
func TestOptionDeviceSum(t *testing.T) {
	eachFamily(t, func(t *testing.T, o *optionPath) {
		taken := func(q packet.Packet) packet.Packet { return o.with(q, o.backend.Addr()) }
		echo := packet.NewEcho(o.nodeA, o.backend.Addr(), 7, 1, []byte("cookie"))
		for _, test := range []struct {
			name string
			send packet.Packet
		}{
			{"SYN", taken(tcp(o.client, o.here, packet.SYN))},
			{"datagram", taken(udp(o.client, o.here))},
			{"ICMP error", taken(packet.NewError(o.client.Addr(), packet.PortUnreachable, 0, udp(o.here, o.client)))},
			{"probe", taken(echo)},
			{"SYN elsewhere", tcp(o.client, o.there, packet.SYN)},
			{"ACK elsewhere", tcp(o.client, o.there, packet.ACK)},
			{"datagram elsewhere", udp(o.client, o.there)},
			{"ICMP error elsewhere", packet.NewError(o.client.Addr(), packet.PortUnreachable, 0, udp(o.there, o.client))},
		} {
			opts := ciliumebpf.RunOptions{Data: o.frame(test.send), DataOut: o.out[:largestOut], Context: o.context, Flags: checksumComplete}
			err := o.at.Do(func() error {
				_, err := o.programs[in].Run(&opts)
				return err
			})
			if err != nil || slices.Equal(opts.DataOut, opts.Data) { // EBADMSG
				t.Errorf("%s: %v, and the result is %x", test.name, err, opts.DataOut)
			}
		}
	})
}

// TestOptionSuper: segments that the kernel merged, or will split later, have room for an option, and go without one. A test run has no
// kind of segments to which one can be added.
func TestOptionSuper(t *testing.T) {
	eachFamily(t, func(t *testing.T, o *optionPath) {
		segments := func(from, to netip.AddrPort) packet.Packet { return sized(tcp(from, to, packet.ACK), 3000) }
		headers, option, tooBig := len(tcp(o.client, o.there, 0).Build()), 8, uint16(packet.FragNeeded)
		if o.here.Addr().Is6() {
			option, tooBig = 24, packet.PacketTooBig6
		}
		before := o.context
		defer func() { o.context = before }()
		merged := func(size int) {
			o.context = slices.Clone(before)
			binary.NativeEndian.PutUint32(o.context[skbGSOSize:], uint32(size))
			binary.NativeEndian.PutUint32(o.context[skbGSOSegs:], uint32((3000-headers+size-1)/size))
		}
		elsewhere, here := tcp(o.client, o.there, packet.SYN), tcp(o.client, o.here, packet.SYN)
		o.expect(t, "a connection elsewhere", in, elsewhere, redirect, o.with(forwarded(elsewhere), o.remote.Addr()), "FORWARD_DIRECT")
		o.expect(t, "a connection here", in, o.with(here, o.backend.Addr()), next, tcp(o.client, o.backend, packet.SYN), "UNWRAP")
		q := segments(o.client, o.there)
		merged(node2MTU - headers - option + 1)
		o.expect(t, "too long with an option", in, q, redirect, o.icmp(o.there, tooBig, uint32(node2MTU-option), q), "ERROR_TOO_BIG")
		merged(node2MTU - headers - option)
		o.expect(t, "not too long", in, q, redirect, withoutOption(o.with(forwarded(q), o.remote.Addr())), "FORWARD_DIRECT")
		bare := segments(o.client, o.backend)
		o.expect(t, "to a backend here", in, bare, next, bare, "FORWARD_LOCAL")
	})
}
