// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"slices"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// cut sends a packet in fragments, and expects the fragments of another one.
func cut(h datapath.Hook, verdict int32, send, want packet.Packet, reason string) (steps []step) {
	const mtu, id = 400, 7
	after := want.Fragments(mtu, id)
	for i, part := range send.Fragments(mtu, id) {
		steps = append(steps, step{h, part, verdict, after[i], reason, nil})
	}
	return steps
}

// fragmentScenes are about fragmented packets. Only the first fragment has ports.
func fragmentScenes(p *path, e ends) []scene {
	const SYN, ACK = packet.SYN, packet.ACK
	long := sized(udp(e.client, e.local), 1200)
	arrived := sized(udp(e.client, e.here), 1200)
	answer, answered := sized(udp(e.here, e.client), 1200), sized(udp(e.local, e.client), 1200)
	far, forwards := sized(udp(e.client, e.remote), 1200), forwarded(sized(udp(e.nat, e.there), 1200))
	farAnswer, farAnswered := sized(udp(e.there, e.nat), 1200), forwarded(sized(udp(e.remote, e.client), 1200))
	begun := step{in, udp(e.client, e.remote), redirect, forwarded(udp(e.nat, e.there)), "FORWARD_REMOTE", nil}
	noSum, noSumArrived := long.Clone(), arrived.Clone()
	noSum.UDP.Checksum, noSumArrived.UDP.Checksum = new(uint16(0)), new(uint16(0))
	segment := func(q packet.Packet) packet.Packet {
		q.Payload = bytes.Repeat([]byte("x"), 1000)
		return q
	}
	parts, after := long.Fragments(400, 9), arrived.Fragments(400, 9)
	unserved := sized(udp(e.client, e.empty), 1200).Fragments(400, 9)
	short := tcp(e.client, e.local, SYN).Fragments(len(tcp(e.client, e.local, SYN).Build())-4, 9)
	begins := segment(tcp(e.client, e.empty, SYN)).Fragments(400, 9)
	return []scene{
		{name: "UDP to a backend here, and its answer", steps: slices.Concat(
			cut(in, next, long, arrived, "FORWARD_LOCAL"),
			cut(out, next, answer, answered, "FORWARD_REPLY"),
		), stats: map[string]lbmap.ServiceStats{"local": {Connections: 1}}},
		{name: "UDP to a backend elsewhere, and its answer", steps: slices.Concat(
			[]step{begun}, // so that its source port is allocated
			cut(in, redirect, far, forwards, "FORWARD_REMOTE"),
			cut(in, redirect, farAnswer, farAnswered, "FORWARD_REPLY"),
		), stats: map[string]lbmap.ServiceStats{"remote": {Connections: 1}}},
		{name: "UDP without checksum", steps: cut(in, next, noSum, noSumArrived, "FORWARD_LOCAL")},
		{name: "TCP", steps: slices.Concat(
			cut(in, next, segment(tcp(e.client, e.local, SYN)), segment(tcp(e.client, e.here, SYN)), "FORWARD_LOCAL"),
			cut(out, next, segment(tcp(e.here, e.client, SYN|ACK)), segment(tcp(e.local, e.client, SYN|ACK)), "FORWARD_REPLY"),
		)},
		{name: "a later one before the first", steps: []step{
			{in, parts[1], next, same, "PASS_FRAGMENT", nil},
			{in, parts[0], next, after[0], "FORWARD_LOCAL", nil},
			{in, parts[2], next, after[2], "FORWARD_LOCAL", nil},
			{in, parts[1], next, after[1], "FORWARD_LOCAL", nil},
		}},
		{name: "of another packet", steps: []step{
			{in, parts[0], next, after[0], "FORWARD_LOCAL", nil},
			{in, long.Fragments(400, 10)[1], next, same, "PASS_FRAGMENT", nil},
		}},
		{name: "without a backend", steps: []step{
			{in, unserved[0], redirect, p.portUnreachable(e.empty, unserved[0]), "REJECT", nil},
			{in, unserved[1], next, same, "", nil},
			{in, begins[0], shot, same, "REJECT", nil},
			{in, begins[1], next, same, "", nil},
		}},
		{name: "too short for its header", steps: []step{
			{in, short[0], next, same, "PASS_HEADERS", nil},
			{in, short[1], next, same, "PASS_FRAGMENT", nil},
		}},
	}
}
