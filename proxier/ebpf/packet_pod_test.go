// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"testing"

	"github.com/tandem-proxy/tandem/test/packet"
)

// TestPacketScenesOfPods plays packets on the device of a pod that opted out.
func TestPacketScenesOfPods(t *testing.T) {
	p := newPodPath(t, Options{NodePortRange: onePort}, false)
	p.endsCluster(t)
	p.play(t, podScenes)
}

func podScenes(p *path, e ends) []scene {
	const SYN, ACK = packet.SYN, packet.ACK
	// A pod that is no endpoint, and the one that is.
	pod := netip.AddrPortFrom(e.here.Addr().Next(), 1000)
	self := netip.AddrPortFrom(e.here.Addr(), 1000)
	to := func(mac packet.MAC, q packet.Packet) packet.Packet {
		q.Ethernet = &packet.Ethernet{Dst: mac, Src: gatewayMAC}
		return q
	}
	bridge := packet.MAC{2, 0, 0, 0, 0, 9}
	return []scene{
		{
			name: "to a backend on this node, which sees the pod",
			steps: []step{
				{in, tcp(pod, e.local, SYN), next, tcp(pod, e.here, SYN), "FORWARD_LOCAL", nil},
				{out, tcp(e.here, pod, SYN|ACK), next, tcp(e.local, pod, SYN|ACK), "FORWARD_REPLY", nil},
				{in, tcp(pod, e.local, ACK), next, tcp(pod, e.here, ACK), "FORWARD_LOCAL", nil},
			},
		},
		{
			name: "to one of another node, which sees the pod as well",
			steps: []step{
				{in, udp(pod, e.remote), next, udp(pod, e.there), "FORWARD_LOCAL", nil},
				{in, udp(e.there, pod), next, same, "", nil},
				{out, udp(e.there, pod), next, udp(e.remote, pod), "FORWARD_REPLY", nil},
			},
		},
		{
			name: "to itself, which sees the node",
			steps: []step{
				{in, tcp(self, e.local, SYN), redirect, forwarded(tcp(e.nat, e.here, SYN)), "FORWARD_REMOTE", nil},
				{in, tcp(e.here, e.nat, SYN|ACK), redirect, forwarded(tcp(e.local, self, SYN|ACK)), "FORWARD_REPLY", nil},
				{out, tcp(e.here, self, SYN|ACK), next, same, "", nil},
				{in, tcp(self, e.local, ACK), redirect, forwarded(tcp(e.nat, e.here, ACK)), "FORWARD_REMOTE", nil},
			},
		},
		{
			name: "who is no pod is masqueraded towards another node",
			steps: []step{
				endpoints("local", "there"),
				{in, tcp(e.client, e.nodePort, SYN), redirect, forwarded(tcp(e.nat, e.there, SYN)), "FORWARD_REMOTE", nil},
				{in, tcp(e.there, e.nat, SYN|ACK), redirect, forwarded(tcp(e.nodePort, e.client, SYN|ACK)), "FORWARD_REPLY", nil},
				endpoints("local", "here"),
			},
		},
		{
			name: "and a pod by the same way is not",
			steps: []step{
				endpoints("local", "there"),
				{in, tcp(pod, e.nodePort, SYN), next, tcp(pod, e.there, SYN), "FORWARD_LOCAL", nil},
				{out, tcp(e.there, pod, SYN|ACK), next, tcp(e.nodePort, pod, SYN|ACK), "FORWARD_REPLY", nil},
				endpoints("local", "here"),
			},
		},
		{
			name: "a pod is led past external policies, not past others, nor past source ranges",
			steps: []step{
				{in, udp(pod, e.quietPort), next, udp(pod, e.there), "FORWARD_LOCAL", nil},
				{in, tcp(pod, e.balancer, SYN), shot, same, "DROP_SOURCE_RANGE", nil},
				{in, tcp(pod, e.quiet, SYN), shot, same, "DROP_POLICY", nil},
			},
		},
		{
			name: "frames for a bridge, and for many",
			steps: []step{
				{in, to(bridge, tcp(pod, e.local, SYN)), next, to(bridge, tcp(pod, e.here, SYN)), "FORWARD_LOCAL", nil},
				{in, to(packet.MAC{1, 0, 0x5e, 0, 0, 1}, tcp(pod, e.twin, SYN)), next, same, "", nil},
				{in, to(packet.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, tcp(pod, e.twin, SYN)), next, same, "", nil},
			},
		},
		{
			name: "what is refused",
			steps: []step{
				{in, udp(pod, e.empty), redirect, p.portUnreachable(e.empty, udp(pod, e.empty)), "REJECT", nil},
				{in, tcp(pod, e.unserved, SYN), redirect, p.resetOf(e.unserved, pod, packet.RST|ACK, 0, 1), "REJECT", nil},
				{in, tcp(pod, e.here, SYN), next, same, "", nil},
				{out, tcp(e.client, e.local, SYN), next, same, "", nil},
			},
			flows: []string{},
		},
	}
}
