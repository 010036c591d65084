// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// endpoints is a step that changes the endpoints of a Service.
func endpoints(service, names string) step {
	return step{happens: func(p *path) error {
		p.setEndpoints(service, names)
		return p.sync()
	}}
}

// flowScenes are connections that are opened, closed, and opened again.
func flowScenes(p *path, e ends) []scene {
	const SYN, ACK, FIN, RST = packet.SYN, packet.ACK, packet.FIN, packet.RST
	request := func(flags packet.Flags) step {
		return step{in, tcp(e.client, e.local, flags), next, tcp(e.client, e.here, flags), "FORWARD_LOCAL", nil}
	}
	reply := func(flags packet.Flags) step {
		return step{out, tcp(e.here, e.client, flags), next, tcp(e.local, e.client, flags), "FORWARD_REPLY", nil}
	}
	moved := func(flags packet.Flags, to netip.AddrPort) step {
		return step{in, tcp(e.client, e.local, flags), redirect, forwarded(tcp(e.nat, to, flags)), "FORWARD_REMOTE", nil}
	}
	// at gives a segment its sequence number, and the number that it acknowledges.
	at := func(s step, seq, ack uint32) step {
		for _, p := range []*packet.Packet{&s.send, &s.want} {
			*p = p.Clone()
			p.TCP.Seq, p.TCP.Ack = seq, ack
		}
		return s
	}
	// The client's next byte is 101, and that of the backend is 0: numbers wrap around.
	opening := []step{at(request(SYN), 100, 0), at(reply(SYN|ACK), 0xffffffff, 101), at(request(ACK), 101, 0), at(reply(ACK), 0, 101), at(request(ACK), 101, 10), at(reply(ACK), 10, 101)}
	opened := func(more ...step) []step { return slices.Concat(opening, more) }
	left := func(state string) []string {
		return []string{flow(6, [2]any{e.client, e.local}, [2]any{e.here, e.client}, state)}
	}
	bytes := func(requests, replies int) string {
		size := 40
		if e.client.Addr().Is6() {
			size = 60
		}
		return fmt.Sprintf("packets %d/%d bytes %d/%d", requests, replies, requests*size, replies*size)
	}
	return []scene{
		{
			name:  "a SYN that is sent again goes the same way",
			steps: []step{request(SYN), request(SYN), reply(SYN | ACK), request(SYN)},
			flows: left("local young replied " + bytes(3, 1)),
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 1}},
		},
		{
			name:  "a reply alone does not establish",
			steps: []step{request(SYN), reply(SYN | ACK), reply(ACK)},
			flows: left("local young replied " + bytes(1, 2)),
		},
		{
			name:  "one FIN",
			steps: []step{request(SYN), reply(SYN | ACK), request(ACK), request(FIN | ACK)},
			flows: left("local kept replied,fin-request,established " + bytes(3, 1)),
		},
		{
			name:  "both FINs",
			steps: []step{request(SYN), reply(SYN | ACK), request(ACK), request(FIN | ACK), reply(FIN | ACK), request(ACK)},
			flows: left("local young replied,fin-request,fin-reply,closed,established " + bytes(4, 2)),
		},
		{
			name:  "a reset by the backend",
			steps: []step{request(SYN), reply(RST | ACK)},
			flows: left("local young replied,closed " + bytes(1, 1)),
		},
		{
			name:  "a reset by the client",
			steps: []step{request(SYN), reply(SYN | ACK), request(ACK), request(RST)},
			flows: left("local young replied,closed,established " + bytes(3, 1)),
		},
		{
			name: "resets that neither end accepts",
			steps: opened(at(request(RST), 100, 0), at(request(RST), 101+1<<17, 0), at(request(RST), 101+1<<31, 0),
				at(reply(RST|ACK), 9, 101), at(reply(RST|ACK), 10+1<<17, 101)),
			flows: left("local kept replied,established " + bytes(6, 5)),
		},
		{
			name:  "a reset behind bytes that are not acknowledged yet",
			steps: opened(at(request(RST), 100+1<<17, 0)),
			flows: left("local young replied,closed,established " + bytes(4, 3)),
		},
		{
			name:  "a client that goes on did not reset",
			steps: opened(at(request(RST), 101, 0), at(reply(ACK), 10, 101), at(request(ACK), 101, 10)),
			flows: left("local kept replied,established " + bytes(5, 4)),
		},
		{
			name:  "a backend that goes on did not reset",
			steps: opened(at(reply(RST|ACK), 10, 101), at(request(ACK), 101, 10), at(reply(ACK), 10, 101)),
			flows: left("local kept replied,established " + bytes(4, 5)),
		},
		{
			name:  "the other end going on says nothing of a reset",
			steps: opened(at(request(RST), 101, 0), at(reply(ACK), 10, 101)),
			flows: left("local young replied,closed,established " + bytes(4, 4)),
		},
		{
			name:  "one end of two goes on after a reset",
			steps: opened(at(request(RST), 101, 0), at(reply(RST), 10, 0), at(request(ACK), 101, 10)),
			flows: left("local young replied,closed,established " + bytes(5, 4)),
		},
		{
			name:  "a SYN does not undo a reset, but begins anew",
			steps: opened(at(request(RST), 101, 0), at(request(SYN), 100, 0)),
			flows: left("local young " + bytes(1, 0)),
		},
		{
			name:  "a SYN after the end begins anew",
			steps: []step{request(SYN), reply(RST | ACK), request(SYN)},
			flows: left("local young " + bytes(1, 0)),
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 2}},
		},
		{
			name: "and may be led elsewhere",
			steps: []step{
				request(SYN), reply(SYN | ACK), request(ACK), request(RST),
				endpoints("local", "there"), moved(SYN, e.there), endpoints("local", "here"),
			},
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 2}},
		},
		{
			name: "an established connection outlives its endpoint",
			steps: []step{
				request(SYN), reply(SYN | ACK), request(ACK),
				endpoints("local", "there"), request(ACK), reply(ACK), request(SYN), endpoints("local", "here"),
			},
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 1}},
		},
		{
			name: "a SYN to an endpoint that is gone is led to another",
			steps: []step{
				request(SYN), endpoints("local", "there"), moved(SYN, e.there), endpoints("local", "here"),
			},
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 2}},
		},
		{
			name: "UDP is led to another endpoint when its own is gone",
			steps: []step{
				{in, udp(e.client, e.local), next, udp(e.client, e.here), "FORWARD_LOCAL", nil},
				{out, udp(e.here, e.client), next, udp(e.local, e.client), "FORWARD_REPLY", nil},
				{in, udp(e.client, e.local), next, udp(e.client, e.here), "FORWARD_LOCAL", nil},
				endpoints("local", "there"),
				{in, udp(e.client, e.local), redirect, forwarded(udp(e.nat, e.there)), "FORWARD_REMOTE", nil},
				// Packets of the old backend are not translated any more.
				{out, udp(e.here, e.client), next, same, "", nil},
				endpoints("local", "here"),
			},
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 2}},
		},
		{
			name: "UDP without endpoints is rejected, and served again",
			steps: []step{
				{in, udp(e.client, e.local), next, udp(e.client, e.here), "FORWARD_LOCAL", nil},
				endpoints("local", ""),
				{in, udp(e.client, e.local), redirect, p.portUnreachable(e.local, udp(e.client, e.local)), "REJECT", nil},
				endpoints("local", "here"),
				{in, udp(e.client, e.local), next, udp(e.client, e.here), "FORWARD_LOCAL", nil},
			},
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 2, Rejected: 1}},
		},
		{
			name: "who comes from the middle of a connection is led on, but for a reset",
			steps: []step{
				request(ACK), {in, tcp(e.stranger, e.local, RST|ACK), next, same, "PASS_RST", nil},
			},
			flows: left("local young " + bytes(1, 0)),
		},
	}
}

// TestPacketAffinity: a client with affinity gets the same backend for all its ports.
func TestPacketAffinity(t *testing.T) {
	p := newPath(t, Options{})
	p.endsCluster(t)
	for _, e := range []ends{endsOf(0), endsOf(1)} {
		if err := p.reset(); err != nil {
			t.Fatal(err)
		}
		// seen counts the visits to backends, by client.
		seen := map[netip.Addr]map[netip.Addr]int{}
		visit := func(client netip.Addr, to netip.AddrPort, port uint16) {
			t.Helper()
			send := tcp(netip.AddrPortFrom(client, port), to, packet.SYN)
			send.Ethernet = &packet.Ethernet{Dst: p.mac}
			if err := p.at.Do(func() error {
				got, err := p.run(in, send.Build())
				if err != nil {
					return err
				}
				if seen[client] == nil {
					seen[client] = map[netip.Addr]int{}
				}
				seen[client][packet.Parse(got.Frame).Destination().Addr()]++
				return p.model.Check(datapath.In, send.Build(), got)
			}); err != nil {
				t.Fatal(err)
			}
		}
		const visits = 12
		backends := map[netip.Addr]bool{}
		for i := range uint16(20) {
			client := e.client.Addr()
			for range i {
				client = client.Next()
			}
			for port := range uint16(visits) {
				visit(client, e.sticky, 2000+port)
			}
			if len(seen[client]) != 1 {
				t.Errorf("client %s was led to %v", client, seen[client])
			}
			for b := range seen[client] {
				backends[b] = true
			}
		}
		if len(backends) != 3 {
			t.Errorf("all clients were led to %v", backends)
		}
		// Without affinity, a client's connections are spread by port.
		clear(seen)
		for port := range uint16(40) {
			visit(e.client.Addr(), e.both, 3000+port)
		}
		if len(seen[e.client.Addr()]) != 2 {
			t.Errorf("without affinity: %v", seen)
		}
	}
}
