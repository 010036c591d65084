// SPDX-License-Identifier: Apache-2.0

package proxier

// Repair is kernel state of the proxy that another process removed or made ineffective, and
// that the proxy restored.
type Repair struct {
	State RepairedState
	// What names it: what was gone, and where.
	What string
}

// RepairedState is a kind of kernel state. Metrics have it as a label.
type RepairedState string

// The kinds of kernel state that are repaired.
const (
	RepairedDevice RepairedState = "device-programs" // detached from a device
	RepairedOrder  RepairedState = "program-order"   // behind a foreign program
	RepairedCgroup RepairedState = "cgroup-programs" // detached from the cgroup
	RepairedRules  RepairedState = "rules"           // deleted, flushed or changed
)

// RepairedStates has all kinds.
var RepairedStates = []RepairedState{RepairedDevice, RepairedOrder, RepairedCgroup, RepairedRules}
