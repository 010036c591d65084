// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
)

// ReasonNames are the verdicts on packets of Services as metrics and tandemctl show them.
var ReasonNames = [Reasons]string{
	ForwardLocal: "forwarded_local", ForwardRemote: "forwarded_remote", ForwardReply: "forwarded_reply", ForwardICMP: "forwarded_icmp",
	AnswerEcho: "answered_echo",
	Reject:     "rejected_no_backend", RejectNoPort: "rejected_no_source_port", ErrorTTL: "error_ttl", ErrorTooBig: "error_too_big",
	DropPolicy: "dropped_policy", DropSourceRange: "dropped_source_range", DropNoFlow: "dropped_no_flow", DropRaced: "dropped_raced",
	DropRewrite: "dropped_rewrite", DropNoRoute: "dropped_no_route",
	PassRST: "passed_reset", PassNetfilter: "passed_netfilter", PassFragment: "passed_fragment", PassHeaders: "passed_headers", PassMartian: "passed_martian",
	PassNoUplink: "passed_no_uplink", Remap: "remapped",
	HeldBack:  "held_back",
	PushedOut: "pushed_out",
	// Of direct server return.
	ForwardDirect: "forwarded_direct", Unwrap: "unwrapped", DropNoTarget: "dropped_no_target", Accelerated: "accelerated",
}

// ReasonName is the name of enum reason.
func ReasonName(reason uint32) string {
	if reason < Reasons {
		return ReasonNames[reason]
	}
	return fmt.Sprintf("reason_%d", reason)
}

// PacketCount counts packets by verdict.
type PacketCount struct {
	Result string `json:"result"`
	Count  uint64 `json:"count"`
}

// ReadPacketCounts sums up the counters of all CPUs.
func ReadPacketCounts(m *ciliumebpf.Map) ([]PacketCount, error) {
	counts := make([]PacketCount, Reasons)
	var perCPU []uint64
	for i, name := range ReasonNames {
		counts[i].Result = name
		if i >= int(m.MaxEntries()) {
			continue // programs of another version
		}
		if err := m.Lookup(uint32(i), &perCPU); err != nil {
			return nil, fmt.Errorf("read the packets that were %s: %w", name, err)
		}
		for _, n := range perCPU {
			counts[i].Count += n
		}
	}
	return counts, nil
}
