// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
)

// fakeFrontends behaves as the kernel's map does, full map included.
type fakeFrontends struct {
	entries map[frontendKey]frontendValue
	max     int
	writes  int
	// fail, if set, may refuse an update or delete of a key.
	fail func(frontendKey) error
}

var errFull = errors.New("map is full")

func (f *fakeFrontends) MaxEntries() int { return f.max }

func (f *fakeFrontends) Update(keys []frontendKey, values []frontendValue) (int, error) {
	for i, key := range keys {
		if f.fail != nil {
			if err := f.fail(key); err != nil {
				return i, err
			}
		}
		if _, known := f.entries[key]; !known && len(f.entries) >= f.max {
			return i, errFull
		}
		f.writes++
		f.entries[key] = values[i]
	}
	return len(keys), nil
}

func (f *fakeFrontends) Delete(keys []frontendKey) error {
	for _, key := range keys {
		if f.fail != nil {
			if err := f.fail(key); err != nil {
				return err
			}
		}
		f.writes++
		delete(f.entries, key)
	}
	return nil
}

func (f *fakeFrontends) Lookup(key frontendKey) (frontendValue, bool, error) {
	value, ok := f.entries[key]
	return value, ok, nil
}

func (f *fakeFrontends) Dump(fn func(frontendKey, frontendValue)) error {
	for key, value := range f.entries {
		fn(key, value)
	}
	return nil
}

// fakeTables are tables in ordinary memory, for tests without a kernel.
func fakeTables(s Sizes) *tables {
	return &tables{
		frontends:    &fakeFrontends{entries: map[frontendKey]frontendValue{}, max: int(s.Frontends)},
		ranges:       fakeMap[rangeKey, uint8]{map[rangeKey]uint8{}, int(s.Ranges)},
		locals:       fakeMap[[4]uint32, uint32]{map[[4]uint32]uint32{}, int(s.Locals)},
		vips:         fakeMap[[4]uint32, uint8]{map[[4]uint32]uint8{}, int(s.Frontends)},
		meta:         &metaEntry{},
		nodes:        make([]nodeEntry, 2),
		sets:         make([]uint64, s.Services*SetsPerService),
		slots:        make([]uint64, s.Slots),
		backends:     make([]backendEntry, s.Backends),
		services:     make([]serviceEntry, s.Services),
		serviceStats: make([]serviceStats, s.Services),
		backendStats: make([]uint64, s.Backends),
	}
}

// fakeMap behaves as a kernelMap.
type fakeMap[K comparable, V any] struct {
	entries map[K]V
	max     int
}

func (f fakeMap[K, V]) MaxEntries() int { return f.max }

func (f fakeMap[K, V]) Put(key K, value V) error {
	if _, known := f.entries[key]; !known && len(f.entries) >= f.max {
		return errFull
	}
	f.entries[key] = value
	return nil
}

func (f fakeMap[K, V]) Delete(key K) error {
	delete(f.entries, key)
	return nil
}

func (f fakeMap[K, V]) Dump(fn func(K, V)) error {
	for key, value := range f.entries {
		fn(key, value)
	}
	return nil
}
