// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Record is a flow at the time it was read.
type Record struct {
	// Service is its id; 0 if the flow is of none, or of one that is gone.
	Service  uint32
	Protocol proxier.Protocol
	// Client and Frontend are source and destination of requests as they arrive, Backend and Source as they
	// go on. Source is Client's unless they are masqueraded, or get another port.
	Client, Frontend, Source, Backend netip.AddrPort
	State                             State
	// Action is one of enum flow_action.
	Action uint8
	// Device is the index of the one that the last request came in by.
	Device uint32
	// Age and Idle are the times since the first packet and since the last one, in whole seconds. Age is nil if the
	// programs that made the flow did not note it.
	Age               *time.Duration
	Idle              time.Duration
	Requests, Replies Traffic
}

// Records calls fn with all flows in these maps, which may be read-only. A flow that changes meanwhile may be
// shown as it was or as it is, and its traffic be missing.
func Records(t *lbmap.Tables, maps lbmap.Maps, fn func(Record)) error {
	type key struct {
		id, generation uint32
		reply          bool
	}
	of := map[key]Traffic{}
	err := eachLive(maps["tdm_flow_entry"], maps["tdm_flow"].MaxEntries(), func(e *lbmap.FlowEntry, reply bool) {
		of[key{e.Id, e.Generation, reply}] = Traffic{e.Packets, e.Bytes}
	})
	if err != nil {
		return err
	}
	now := MonotonicSeconds()
	return eachWindow(maps["tdm_flow"], false, func(s span[lbmap.Flow]) error {
		for i := range s.list {
			life := atomic.LoadUint64(&s.list[i].Life)
			if lbmap.FlowStage(life) < lbmap.FlowYoung {
				continue
			}
			f := s.list[i]
			if after := atomic.LoadUint64(&s.list[i].Life); after>>32 != life>>32 || lbmap.FlowStage(after) < lbmap.FlowYoung {
				continue // it ended, and what was copied may be of another one
			}
			r := Record{
				Service: serviceOf(t, &f), Protocol: proxier.Protocol(f.Request.Proto),
				Client: lbmap.ToAddrPort(f.Request.Src, f.Request.Sport), Frontend: lbmap.ToAddrPort(f.Request.Dst, f.Request.Dport),
				Source: lbmap.ToAddrPort(f.Reply.Dst, f.Reply.Dport), Backend: lbmap.ToAddrPort(f.Reply.Src, f.Reply.Sport),
				State: stateOf(proxier.Protocol(f.Request.Proto), uint32(f.Flags)), Action: f.Action, Device: f.Ingress,
				Age: ageOf(&f, now), Idle: SecondsSince(f.Seen, now),
			}
			id, generation := s.first+uint32(i), uint32(life>>32)
			r.Requests, r.Replies = of[key{id, generation, false}], of[key{id, generation, true}]
			fn(r)
		}
		return nil
	})
}

// ageOf is the time since the first packet of a flow; nil if it is not known. The record has the low bits of that second,
// so it is the last one with these bits before the last packet; a flow that is used for half a year seems younger.
func ageOf(f *lbmap.Flow, now uint32) *time.Duration {
	low := uint32(f.Created[0]) | uint32(f.Created[1])<<8 | uint32(f.Created[2])<<16
	if low == 0 {
		return nil
	}
	return new(SecondsSince(f.Seen-(f.Seen-low)&(1<<24-1), now))
}

// SecondsSince is the time since a second of MonotonicSeconds, which may have begun after now was read.
func SecondsSince(second, now uint32) time.Duration {
	return time.Duration(max(0, int32(now-second))) * time.Second
}
