// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"
	"runtime/debug"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

// gcPercent makes the heap grow to one and a half times what is in use before
// it is collected, not to twice: memory is what a node has least of. The start takes
// a tenth more CPU time, but no longer.
const gcPercent = 50

// limitGarbage applies gcPercent, unless the operator chose another value.
func limitGarbage() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

// settleTime is how long after the first sync the sources still hold on to what
// they received.
const settleTime = 3 * time.Second

// slow is what a full sync takes that has read large tables.
const slow = 100 * time.Millisecond

// memory keeps the process small: it implements proxier.Observer to know when
// the start is over, and when much was read.
type memory struct{ started bool }

// Queued implements proxier.Observer.
func (*memory) Queued(time.Time) {}

// Synced gives back what reading and decoding the first lists took, or all rules that
// there are. Nothing else would for minutes: an idle process allocates too little to
// collect.
func (m *memory) Synced(info proxier.SyncInfo) {
	read := info.Full && info.End.Sub(info.Start) > slow
	if info.Err != nil || m.started && !read {
		return
	}
	m.started = true
	time.AfterFunc(settleTime, debug.FreeOSMemory)
}
