// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"errors"
	"fmt"
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
func TrafficByService(t *lbmap.Tables, flows *ciliumebpf.Map, used int) (map[uint32]Traffic, error) {
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
	err := eachFlow(flows, func(f *lbmap.Flow) {
		count(serviceOf(t, f), f.Packets[0]+f.Packets[1], f.Bytes[0]+f.Bytes[1])
	})
	return by, err
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

// eachFlow calls fn with a copy of each flow.
func eachFlow(m *ciliumebpf.Map, fn func(*lbmap.Flow)) error {
	const chunk = 4096
	keys, values := make([]uint32, chunk), make([]lbmap.Flow, chunk)
	var cursor ciliumebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
			return fmt.Errorf("read the flows: %w", err)
		}
		for i := range values[:n] {
			if f := &values[i]; lbmap.FlowStage(f.Life) >= lbmap.FlowYoung {
				fn(f)
			}
		}
		if err != nil {
			return nil
		}
	}
}
