// SPDX-License-Identifier: Apache-2.0

package ebpf

// The structures of bpf/flow_types.h under their Go names.
type (
	flowEntry   = tcFlow
	flowKey     = tcFlowKey
	flowCounter = tcFlowCounter
)

// Stages of a flow, the low byte of its life; the generation is in the high
// half.
const (
	flowFree = iota
	flowClaimed
	flowNew
	flowYoung
	flowKept
)

// Flags of a flow.
const (
	flowIndexed = 1 << iota
	flowIngress
	flowRemote
	flowReplied
	flowFinRequest
	flowFinReply
	flowClosed
	flowEstablished
)

// Elements of the map of flow counters.
const (
	flowTop = iota
	flowFresh
	flowUsed
	flowBorn
	flowOver
	flowKeptTCP
	flowKeptUDP
)

func stageOf(life uint64) int { return int(life & 0xff) }

func lifeOf(generation uint32, stage int) uint64 { return uint64(generation)<<32 | uint64(stage) }

// maxClosed is MAX_CLOSED of bpf/tc_config.h.
const maxClosed = 2048
