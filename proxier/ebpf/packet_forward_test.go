// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/packet"
)

// flow is a line of path.dump.
func flow(protocol int, request, reply [2]any, state string) string {
	return fmt.Sprintf("%d %v > %v, %v > %v %s", protocol, request[0], request[1], reply[0], reply[1], state)
}

// forwardScenes send the packets of connections in both directions, and compare the resulting
// flows.
func forwardScenes(p *path, e ends) []scene {
	const SYN, ACK, FIN = packet.SYN, packet.ACK, packet.FIN
	// The lengths of a TCP segment and of a datagram of udp().
	tcpLen, udpLen := 40, 33
	if e.client.Addr().Is6() {
		tcpLen, udpLen = 60, 53
	}
	hello := func(flags packet.Flags) packet.Packet {
		return packet.NewTCP(e.client, e.local, flags, []byte("hello"))
	}
	return []scene{
		{
			name: "TCP to a backend on this node, source kept",
			steps: []step{
				{in, tcp(e.client, e.local, SYN), next, tcp(e.client, e.here, SYN), "FORWARD_LOCAL", nil},
				{out, tcp(e.here, e.client, SYN|ACK), next, tcp(e.local, e.client, SYN|ACK), "FORWARD_REPLY", nil},
				{in, hello(ACK), next, packet.NewTCP(e.client, e.here, ACK, []byte("hello")), "FORWARD_LOCAL", nil},
			},
			flows: []string{flow(6, [2]any{e.client, e.local}, [2]any{e.here, e.client},
				fmt.Sprintf("local kept replied,established packets 2/1 bytes %d/%d", 2*tcpLen+5, tcpLen))},
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 1}},
		},
		{
			name: "TCP to a backend of another node, from this node's address",
			steps: []step{
				{in, tcp(e.client, e.remote, SYN), redirect, forwarded(tcp(e.nat, e.there, SYN)), "FORWARD_REMOTE", nil},
				{in, tcp(e.there, e.nat, SYN|ACK), redirect, forwarded(tcp(e.remote, e.client, SYN|ACK)), "FORWARD_REPLY", nil},
				{in, tcp(e.client, e.remote, ACK), redirect, forwarded(tcp(e.nat, e.there, ACK)), "FORWARD_REMOTE", nil},
			},
			flows: []string{flow(6, [2]any{e.client, e.remote}, [2]any{e.there, e.nat},
				fmt.Sprintf("remote kept replied,established packets 2/1 bytes %d/%d", 2*tcpLen, tcpLen))},
			stats: map[string]lbmap.ServiceStats{"remote": {Connections: 1}},
		},
		{
			name: "UDP to a backend on this node",
			steps: []step{
				{in, udp(e.client, e.local), next, udp(e.client, e.here), "FORWARD_LOCAL", nil},
				{out, udp(e.here, e.client), next, udp(e.local, e.client), "FORWARD_REPLY", nil},
				{in, udp(e.client, e.local), next, udp(e.client, e.here), "FORWARD_LOCAL", nil},
			},
			flows: []string{flow(17, [2]any{e.client, e.local}, [2]any{e.here, e.client},
				fmt.Sprintf("local kept replied,established packets 2/1 bytes %d/%d", 2*udpLen, udpLen))},
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 1}},
		},
		{
			name: "UDP to a backend of another node",
			steps: []step{
				{in, udp(e.client, e.remote), redirect, forwarded(udp(e.nat, e.there)), "FORWARD_REMOTE", nil},
				{in, udp(e.there, e.nat), redirect, forwarded(udp(e.remote, e.client)), "FORWARD_REPLY", nil},
			},
			flows: []string{flow(17, [2]any{e.client, e.remote}, [2]any{e.there, e.nat},
				fmt.Sprintf("remote young replied packets 1/1 bytes %d/%d", udpLen, udpLen))},
		},
		{
			name: "NodePort, load balancer IP, and a client that is a pod of another node",
			steps: []step{
				{in, tcp(e.client, e.nodePort, SYN), next, tcp(e.client, e.here, SYN), "FORWARD_LOCAL", nil},
				{in, tcp(e.podOfNode2, e.local, SYN), next, tcp(e.podOfNode2, e.here, SYN), "FORWARD_LOCAL", nil},
			},
			stats: map[string]lbmap.ServiceStats{"local": {Connections: 2}},
		},
		{
			name: "the same packets in the wrong place",
			steps: []step{
				{in, tcp(e.client, e.local, SYN), next, tcp(e.client, e.here, SYN), "FORWARD_LOCAL", nil},
				{in, tcp(e.here, e.client, SYN|ACK), next, same, "", nil},
				{out, tcp(e.client, e.local, ACK), next, same, "", nil},
				{in, tcp(e.client, e.remote, SYN), redirect, forwarded(tcp(e.nat, e.there, SYN)), "FORWARD_REMOTE", nil},
				{out, tcp(e.there, e.nat, SYN|ACK), next, same, "", nil},
				{out, tcp(e.stranger, e.local, SYN), next, same, "", nil},
			},
		},
		{
			name: "what the programs do not serve",
			steps: []step{
				{in, tcp(e.client, e.here, SYN), next, same, "", nil},
				{out, tcp(e.here, e.stranger, ACK), next, same, "", nil},
				{in, tcp(e.there, e.nat, ACK), next, same, "", nil},
				{in, tcp(e.client, e.elsewhere, SYN), next, same, "", nil},
				{in, tcp(e.client, e.local, packet.RST), next, same, "PASS_RST", nil},
			},
			flows: []string{},
			stats: map[string]lbmap.ServiceStats{},
		},
		{
			name: "a backend of another node without a route, until there is one",
			steps: []step{
				{in, tcp(e.client, e.lost, SYN), shot, same, "DROP_NO_ROUTE", nil},
				{in, udp(e.client, e.lost), shot, same, "DROP_NO_ROUTE", nil},
				{happens: func(p *path) error { return errors.Join(p.resolve(), p.setRoute(e.away.Addr(), true)) }},
				{in, udp(e.client, e.lost), redirect, forwarded(udp(e.nat, e.away)), "FORWARD_REMOTE", nil},
				{in, udp(e.client, e.lost), redirect, forwarded(udp(e.nat, e.away)), "FORWARD_REMOTE", nil},
				{in, udp(e.client, e.lost), redirect, forwarded(udp(e.nat, e.away)), "FORWARD_REMOTE", nil},
				{happens: func(p *path) error { return p.setRoute(e.away.Addr(), false) }},
				{in, udp(e.client, e.lost), shot, same, "DROP_NO_ROUTE", nil},
			},
			flows: []string{flow(17, [2]any{e.client, e.lost}, [2]any{e.away, e.nat}, fmt.Sprintf("remote young packets 4/0 bytes %d/0", 4*udpLen))},
		},
		{
			name: "a backend of another node behind a device without programs",
			steps: []step{
				{in, tcp(e.client, e.astray, SYN), next, tcp(e.client, e.here, SYN), "PASS_NO_UPLINK FORWARD_LOCAL", nil},
				// Where replies pass this node, the client gets them; where they do not, nothing here can change that.
				{out, tcp(e.here, e.client, SYN|ACK), next, tcp(e.astray, e.client, SYN|ACK), "FORWARD_REPLY", nil},
			},
			flows: []string{flow(6, [2]any{e.client, e.astray}, [2]any{e.here, e.client}, fmt.Sprintf("local young replied packets 1/1 bytes %d/%d", tcpLen, tcpLen))},
		},
		{
			name: "another port of a NodePort's address",
			steps: []step{
				{in, udp(e.client, e.nodePort), next, udp(e.client, e.here), "FORWARD_LOCAL", nil},
				{in, udp(e.client, e.nat), next, same, "", nil},
			},
		},
	}
}
