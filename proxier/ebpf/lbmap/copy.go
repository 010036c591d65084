// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
)

// Copy is a copy of tables into larger maps. Programs use the earlier ones until theirs are replaced, and what they write until
// then is carried over by Finish.
type Copy struct {
	from, to Maps
	tables   *Tables // of from, mapped by the copy
	into     *Tables
	// counted are the counters as they were copied.
	counted map[string][]uint64
}

// counterMaps are arrays of counters that programs add to.
var counterMaps = []string{"tdm_svc_stats", "tdm_be_stats"}

// clientMaps are LRU maps that programs write.
var clientMaps = []string{"tdm_affinity", "tdm_udp_peer"}

// CopyTables copies the tables in from into those maps of to that are others. Nothing but programs may change either of them. The
// copy keeps from open until Finish.
func CopyTables(from, to Maps, tables, into *Tables) (*Copy, error) {
	c := &Copy{from: from, to: to, tables: tables, into: into, counted: map[string][]uint64{}}
	if c.moved("tdm_frontend") {
		if err := copyFrontends(tables.Frontends, into.Frontends); err != nil {
			return nil, err
		}
	}
	for _, array := range []struct {
		name string
		copy func()
	}{
		{"tdm_set", func() { copy(into.Sets, tables.Sets) }},
		{"tdm_slot", func() { copy(into.Slots, tables.Slots) }},
		{"tdm_backend", func() { copy(into.Backends, tables.Backends) }},
		{"tdm_service", func() { copy(into.Services, tables.Services) }},
	} {
		if c.moved(array.name) {
			array.copy()
		}
	}
	for _, name := range counterMaps {
		if !c.moved(name) {
			continue
		}
		there, copied := tables.counters(name), into.counters(name)
		c.counted[name] = make([]uint64, len(there))
		for i := range there {
			c.counted[name][i] = atomic.LoadUint64(&there[i])
			atomic.StoreUint64(&copied[i], c.counted[name][i])
		}
	}
	return c, c.copyClients()
}

func (c *Copy) moved(name string) bool { return c.from[name] != c.to[name] }

// Finish carries over what programs wrote since the copy began. It is called when no program uses the earlier maps any more, and
// before the earlier tables are unmapped.
func (c *Copy) Finish() error {
	for name, counted := range c.counted {
		there, copied := c.tables.counters(name), c.into.counters(name)
		for i := range there {
			if now := atomic.LoadUint64(&there[i]); now != counted[i] {
				atomic.AddUint64(&copied[i], now-counted[i])
			}
		}
	}
	return c.copyClients()
}

// counters are all words of an array of counters.
func (t *Tables) counters(name string) []uint64 {
	if name == "tdm_be_stats" {
		return t.BackendStats
	}
	const words = unsafe.Sizeof(ServiceStats{}) / 8
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(t.ServiceStats))), uintptr(len(t.ServiceStats))*words)
}

// copyClients copies entries that the larger maps lack: those that are there may be newer.
func (c *Copy) copyClients() error {
	for _, name := range clientMaps {
		if !c.moved(name) {
			continue
		}
		var key, value []byte
		all := c.from[name].Iterate()
		for all.Next(&key, &value) {
			if err := c.to[name].Update(key, value, ciliumebpf.UpdateNoExist); err != nil && !errors.Is(err, ciliumebpf.ErrKeyExist) {
				return fmt.Errorf("copy an entry of %s: %w", name, err)
			}
		}
		// It ends early if programs change the map much; the rest is found anew by clients.
		if err := all.Err(); err != nil && !errors.Is(err, ciliumebpf.ErrIterationAborted) {
			return fmt.Errorf("copy %s: %w", name, err)
		}
	}
	return nil
}

func copyFrontends(from, to FrontendMap) error {
	const chunk = 4096
	keys, values := make([]FrontendKey, 0, chunk), make([]FrontendValue, 0, chunk)
	var failed error
	flush := func() {
		if failed == nil && len(keys) > 0 {
			_, failed = to.Update(keys, values)
		}
		keys, values = keys[:0], values[:0]
	}
	err := from.Dump(func(key FrontendKey, value FrontendValue) {
		if keys, values = append(keys, key), append(values, value); len(keys) == chunk {
			flush()
		}
	})
	flush()
	if err = errors.Join(err, failed); err != nil {
		return fmt.Errorf("copy the frontends: %w", err)
	}
	return nil
}
