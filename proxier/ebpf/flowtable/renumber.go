// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"sync/atomic"
	"unsafe"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// renumberIn gives flows in these maps other ids of their services and backends, while programs use them. The generation of a backend
// comes last: until then, programs take the flow for one of earlier tables.
func renumberIn(maps lbmap.Maps, renumber func(*lbmap.Flow)) (err error) {
	m := maps["tdm_flow"]
	if m == nil {
		return nil
	}
	var mapped [][]byte
	var flows []lbmap.Flow
	defer func() { unmap(&mapped) }()
	if err := mapTo(&mapped, &flows, m); err != nil {
		return err
	}
	for id := range flows {
		f := &flows[id]
		life := atomic.LoadUint64(&f.Life)
		if lbmap.FlowStage(life) < lbmap.FlowYoung {
			continue
		}
		was := *f
		if atomic.LoadUint64(&f.Life) != life {
			continue
		}
		now := was
		if renumber(&now); now.BackendGeneration == was.BackendGeneration {
			continue
		}
		if atomic.CompareAndSwapUint64(ids(f), *ids(&was), *ids(&now)) {
			atomic.CompareAndSwapUint32(&f.BackendGeneration, was.BackendGeneration, now.BackendGeneration)
		}
	}
	return nil
}

// ids are those of the service and the backend of a flow, as one number.
func ids(f *lbmap.Flow) *uint64 { return (*uint64)(unsafe.Pointer(&f.Service)) }
