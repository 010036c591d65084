// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// flow4 is a flow of layout 4. Its keys are in a hash map, tdm_flow_key; their values are the id of
// the flow (low half) and its generation.
type flow4 struct {
	Life                                      uint64
	Seen, Flags                               uint32
	Request, Reply                            lbmap.FlowKey
	Service, Backend, BackendGeneration, Next uint32
	Packets, Bytes                            [2]uint64
}

// Flags of layout 4 in place of an action.
const ingress4, remote4 = 1 << 1, 1 << 2

// born4 is the element of tdm_flow_count that is lbmap.FlowBorn now.
const born4 = 3

// layout4 are flows of layout 4.
type layout4 struct {
	flows, keys *ciliumebpf.Map
	records     []flow4
	places      []uint64
	counts      []lbmap.FlowCounter
	memory      [][]byte
}

func openLayout4(maps lbmap.Maps) (*layout4, error) {
	l := &layout4{}
	var err, keysErr error
	l.flows, err = maps["tdm_flow"].Clone()
	l.keys, keysErr = maps["tdm_flow_key"].Clone()
	err = errors.Join(err, keysErr,
		mapTo(&l.memory, &l.records, maps["tdm_flow"]), mapTo(&l.memory, &l.places, maps["tdm_flow_young"]), mapTo(&l.memory, &l.counts, maps["tdm_flow_count"]))
	if err != nil {
		l.close()
		return nil, fmt.Errorf("open the flows of layout 4: %w", err)
	}
	return l, nil
}

func (l *layout4) count() int            { return len(l.records) }
func (l *layout4) life(id uint32) uint64 { return atomic.LoadUint64(&l.records[id].Life) }
func (l *layout4) flags(id uint32) uint32 {
	return atomic.LoadUint32(&l.records[id].Flags) &^ (ingress4 | remote4)
}
func (l *layout4) ring() []uint64 { return l.places }
func (l *layout4) born() uint64   { return atomic.LoadUint64(&l.counts[born4].Value) }

func (l *layout4) read(id uint32) (f lbmap.Flow, of [2]progress) {
	e := l.records[id]
	f = lbmap.Flow{
		Life: e.Life, Flags: uint64(e.Flags &^ (ingress4 | remote4)), Seen: e.Seen, Request: e.Request, Reply: e.Reply,
		Service: e.Service, Backend: e.Backend, BackendGeneration: e.BackendGeneration,
	}
	// Their next request tells the device.
	if f.Action = lbmap.ActionLocal; e.Flags&remote4 != 0 {
		f.Action = lbmap.ActionSNAT
	}
	for way := range of {
		of[way].Traffic = Traffic{Packets: e.Packets[way], Bytes: e.Bytes[way]}
	}
	return f, of
}

func (l *layout4) find(request *lbmap.FlowKey) (id uint32, ok bool, err error) {
	var word uint64
	err = l.keys.Lookup(request, &word)
	if errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("look for a flow: %w", err)
	}
	return uint32(word), true, nil
}

func (l *layout4) is(flows *ciliumebpf.Map) (bool, error) { return lbmap.SameMap(l.flows, flows) }

func (l *layout4) close() {
	unmap(&l.memory)
	l.flows.Close()
	l.keys.Close()
}

// sizeOf is the size of an element of an array.
func sizeOf[T any]() uint32 {
	var element T
	return uint32(unsafe.Sizeof(element))
}
