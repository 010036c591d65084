// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// of is the timeout of a flow with these flags.
func (t *Timeouts) of(s State) time.Duration {
	switch s {
	case Established:
		return t.Established
	case Closing:
		return t.CloseWait
	case Closed:
		return t.Closed
	case Answered:
		return t.UDPStream
	case Unanswered:
		return t.UDP
	}
	return t.Opening
}

// CollectInterval is the time between two looks at all flows, gcPause that between
// two windows: a look at 262,144 flows takes some milliseconds of a CPU.
const (
	CollectInterval = 5 * time.Second
	gcPause         = time.Millisecond
)

// Sweep looks at all flows once, and returns how many it removed.
func (t *Table) Sweep(ctx context.Context, timeouts *Timeouts, now uint32) (ended int, err error) {
	var ids []uint32
	var uses []use
	traffic, seen := map[uint32]Traffic{}, map[uint32]claim{}
	err = t.Each(func(first int, list []lbmap.Flow) error {
		ids, uses = ids[:0], uses[:0]
		clear(traffic)
		for i := range list {
			f, id := &list[i], uint32(first+i)
			if t.claim(f, timeouts, now) || t.isStale(id, f, seen) {
				u := usesOf(id, f)
				ids, uses = append(ids, id), append(uses, u[:]...)
			}
		}
		err := removeAll(t.Entries, t.filter, uses, func(u use, of Traffic) {
			sum := traffic[u.id]
			sum.add(of.Packets, of.Bytes)
			traffic[u.id] = sum
		})
		if err != nil {
			return err // Recover frees claimed flows later
		}
		for _, id := range ids {
			f := &list[int(id)-first]
			t.countUp(f, traffic[id])
			atomic.StoreUint64(&f.Life, f.Life&^0xff)
			t.give(id, f)
		}
		ended += len(ids)
		if first+len(list) < int(t.Flows.MaxEntries()) {
			pause(ctx, gcPause)
		}
		return ctx.Err()
	})
	t.stale = seen
	return ended, err
}

// claim is a claimed flow, and when it was first seen.
type claim struct {
	life  uint64
	since time.Time
}

// staleAfter is much longer than any program takes that has claimed a flow.
const staleAfter = CollectInterval / 2

// isStale reports whether a flow has been claimed for so long that no CPU can still be writing it: its id could
// not be freed. seen gets what is claimed.
func (t *Table) isStale(id uint32, f *lbmap.Flow, seen map[uint32]claim) bool {
	life := atomic.LoadUint64(&f.Life)
	if lbmap.FlowStage(life) != lbmap.FlowClaimed {
		return false
	}
	before, ok := t.stale[id]
	if !ok || before.life != life {
		seen[id] = claim{life, time.Now()}
		return false
	}
	if time.Since(before.since) < staleAfter {
		seen[id] = before
		return false
	}
	return true
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// claim takes a flow that timed out, so that no program ends it too.
func (t *Table) claim(f *lbmap.Flow, timeouts *Timeouts, now uint32) bool {
	life := atomic.LoadUint64(&f.Life)
	if lbmap.FlowStage(life) < lbmap.FlowYoung || !isUp(f, timeouts, now) {
		return false
	}
	claimed := lbmap.FlowLife(uint32(life>>32), lbmap.FlowClaimed)
	if !atomic.CompareAndSwapUint64(&f.Life, life, claimed) {
		return false
	}
	if !isUp(f, timeouts, now) { // a packet came in between
		atomic.StoreUint64(&f.Life, life)
		return false
	}
	if lbmap.FlowStage(life) == lbmap.FlowKept {
		kept := lbmap.FlowKeptUDP
		if proxier.Protocol(f.Request.Proto) == proxier.TCP {
			kept = lbmap.FlowKeptTCP
		}
		atomic.AddUint64(&t.counts[kept].Value, ^uint64(0))
	}
	return true
}

// countUp adds the traffic of a flow to that of its service, as flow_count_traffic() of
// bpf/flow_life.h does. A table without services counts nothing.
func (t *Table) countUp(f *lbmap.Flow, of Traffic) {
	if t.tables == nil {
		return
	}
	service := serviceOf(t.tables, f)
	s := &t.tables.ServiceStats[service]
	atomic.AddUint64(&s.Packets, of.Packets)
	atomic.AddUint64(&s.Bytes, of.Bytes)
	if service != 0 && wasUnanswered(f) {
		atomic.AddUint64(&s.Unanswered, 1)
	}
}

// wasUnanswered reports whether a backend never answered the client of a TCP flow, as flow_count_unanswered() of
// bpf/flow_life.h does. Of direct server return, replies do not come by.
func wasUnanswered(f *lbmap.Flow) bool {
	return proxier.Protocol(f.Request.Proto) == proxier.TCP && atomic.LoadUint64(&f.Flags)&(lbmap.FlowReplied|lbmap.FlowClosed) == 0 &&
		f.Action != lbmap.ActionDirect
}

func isUp(f *lbmap.Flow, timeouts *Timeouts, now uint32) bool {
	limit := timeouts.of(stateOf(proxier.Protocol(f.Request.Proto), uint32(atomic.LoadUint64(&f.Flags))))
	return int32(now-atomic.LoadUint32(&f.Seen)) > int32(limit/time.Second)
}

// MonotonicSeconds is the clock of flow.seen.
func MonotonicSeconds() uint32 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now) // there is one
	return uint32(now.Sec)
}
