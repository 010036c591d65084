// SPDX-License-Identifier: Apache-2.0

package lbmap

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
