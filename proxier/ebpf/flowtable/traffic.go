// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"sync/atomic"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Traffic is the traffic of a service port on devices. Connections that were translated at
// their sockets are not included.
type Traffic struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

func (t *Traffic) add(packets, bytes uint64) {
	t.Packets += packets
	t.Bytes += bytes
}

// TrafficByService is the traffic of each service id: of flows that ended, and of current ones.
// A flow that ends meanwhile may be counted twice or not at all, this once. used is the number
// of flows.
func TrafficByService(t *lbmap.Tables, maps lbmap.Maps, used int) (map[uint32]Traffic, error) {
	by := map[uint32]Traffic{}
	count := func(id uint32, packets, bytes uint64) {
		if packets > 0 {
			sum := by[id]
			sum.add(packets, bytes)
			by[id] = sum
		}
	}
	for id := range t.ServiceStats {
		s := &t.ServiceStats[id]
		count(uint32(id), atomic.LoadUint64(&s.Packets), atomic.LoadUint64(&s.Bytes))
	}
	if used == 0 {
		return by, nil
	}
	of, err := trafficOfFlows(maps["tdm_flow_entry"], maps["tdm_flow"].MaxEntries())
	if err != nil {
		return by, err
	}
	err = eachWindow(maps["tdm_flow"], false, func(s span[lbmap.Flow]) error {
		for i := range s.list {
			f, sum := &s.list[i], &of[s.first+uint32(i)]
			life := atomic.LoadUint64(&f.Life)
			if lbmap.FlowStage(life) >= lbmap.FlowYoung && uint32(life>>32) == sum.generation {
				count(serviceOf(t, f), sum.Packets, sum.Bytes)
			}
		}
		return nil
	})
	return by, err
}

// flowTraffic is the traffic of a flow.
type flowTraffic struct {
	Traffic
	generation uint32
}

// trafficOfFlows is the traffic of each flow id.
func trafficOfFlows(m *ciliumebpf.Map, flows uint32) ([]flowTraffic, error) {
	list := make([]flowTraffic, flows)
	err := eachLive(m, flows, func(e *lbmap.FlowEntry, _ bool) {
		of := &list[e.Id]
		if of.generation != e.Generation {
			*of = flowTraffic{generation: e.Generation}
		}
		of.add(e.Packets, e.Bytes)
	})
	return list, err
}

// eachLive calls fn with the entries of flows below a limit, and whether they are for replies.
func eachLive(m *ciliumebpf.Map, flows uint32, fn func(e *lbmap.FlowEntry, reply bool)) error {
	return eachWindow(m, false, func(s entries) error {
		for i := range s.list {
			e := &s.list[i]
			if word := atomic.LoadUint64(&e.Word); entryState(word) == lbmap.EntryLive && e.Id < flows {
				fn(e, word&lbmap.EntryReply != 0)
			}
		}
		return nil
	})
}

// serviceOf returns the id of a flow's service, or 0 if that may have been reused for another one.
func serviceOf(t *lbmap.Tables, f *lbmap.Flow) uint32 {
	if int(f.Backend) < len(t.Backends) && int(f.Service) < len(t.ServiceStats) {
		if b := &t.Backends[f.Backend]; atomic.LoadUint32(&b.Generation) == f.BackendGeneration && atomic.LoadUint32(&b.Service) == f.Service {
			return f.Service
		}
	}
	return 0
}
