// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
)

// Reasons are the words for enum reason of bpf/reasons.h: the verdicts on packets
// of Services, as metrics and tandemctl show them.
var Reasons = [...]string{
	"forwarded_local", "forwarded_remote", "forwarded_reply", "forwarded_icmp",
	"answered_echo",
	"rejected_no_backend", "rejected_no_source_port", "error_ttl", "error_too_big",
	"dropped_policy", "dropped_source_range", "dropped_no_flow", "dropped_raced", "dropped_rewrite", "dropped_no_route",
	"passed_reset", "passed_netfilter", "passed_fragment", "passed_headers", "passed_martian", "pushed_out",
}

// PacketCount counts packets by verdict.
type PacketCount struct {
	Result string `json:"result"`
	Count  uint64 `json:"count"`
}

// readReasons sums up the counters of all CPUs.
func readReasons(m *ciliumebpf.Map) ([]PacketCount, error) {
	counts := make([]PacketCount, len(Reasons))
	var perCPU []uint64
	for i, name := range Reasons {
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
