// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
)

// The structures of bpf/flow_types.h under their Go names.
type (
	Flow        = tcFlow
	FlowKey     = tcFlowKey
	FlowEntry   = tcFlowEntry
	FlowCounter = tcFlowCounter
	FlowList    = tcFlowList
	Uplink      = tcUplink
)

// FlowStage is the stage of a flow: the low byte of its life.
func FlowStage(life uint64) int { return int(life & 0xff) }

// FlowLife is the word of a flow for its generation and stage.
func FlowLife(generation uint32, stage int) uint64 { return uint64(generation)<<32 | uint64(stage) }

// SetOther tells programs whose flows are counted in this map, tdm_flow_count, which others are with them: OtherNone, OtherBehind or
// OtherAhead.
func SetOther(counts *ciliumebpf.Map, other uint64) error {
	var seed FlowCounter
	if err := counts.Lookup(uint32(FlowSeed), &seed); err != nil {
		return fmt.Errorf("read the seed of flows: %w", err)
	}
	seed.Other = other
	// Programs change only Options, and do so again with the next packet that has one.
	if err := counts.Put(uint32(FlowSeed), seed); err != nil {
		return fmt.Errorf("write the seed of flows: %w", err)
	}
	return nil
}
