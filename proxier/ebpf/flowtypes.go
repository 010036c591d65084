// SPDX-License-Identifier: Apache-2.0

package ebpf

// The structures of bpf/flow_types.h under their Go names.
type (
	flowEntry   = tcFlow
	flowKey     = tcFlowKey
	flowCounter = tcFlowCounter
)

func stageOf(life uint64) int { return int(life & 0xff) }

func lifeOf(generation uint32, stage int) uint64 { return uint64(generation)<<32 | uint64(stage) }
