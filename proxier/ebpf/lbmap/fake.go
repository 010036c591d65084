// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"
)

// FakeFrontends behaves as the kernel's map does, also when it is full.
type FakeFrontends struct {
	Entries map[FrontendKey]FrontendValue
	max     int
	Writes  int
	// Fail, if set, may refuse an update or delete of a key.
	Fail func(FrontendKey) error
}

var errFull = errors.New("map is full")

func (f *FakeFrontends) MaxEntries() int { return f.max }

func (f *FakeFrontends) Update(keys []FrontendKey, values []FrontendValue) (int, error) {
	for i, key := range keys {
		if f.Fail != nil {
			if err := f.Fail(key); err != nil {
				return i, err
			}
		}
		if _, known := f.Entries[key]; !known && len(f.Entries) >= f.max {
			return i, errFull
		}
		f.Writes++
		f.Entries[key] = values[i]
	}
	return len(keys), nil
}

func (f *FakeFrontends) Delete(keys []FrontendKey) error {
	for _, key := range keys {
		if f.Fail != nil {
			if err := f.Fail(key); err != nil {
				return err
			}
		}
		f.Writes++
		delete(f.Entries, key)
	}
	return nil
}

func (f *FakeFrontends) Lookup(key FrontendKey) (FrontendValue, bool, error) {
	value, ok := f.Entries[key]
	return value, ok, nil
}

func (f *FakeFrontends) Dump(fn func(FrontendKey, FrontendValue)) error {
	for key, value := range f.Entries {
		fn(key, value)
	}
	return nil
}

// NewFakeTables are tables in ordinary memory, for tests without a kernel.
func NewFakeTables(s Sizes) *Tables {
	return &Tables{
		Frontends:    &FakeFrontends{Entries: map[FrontendKey]FrontendValue{}, max: int(s.Frontends)},
		Ranges:       FakeMap[RangeKey, uint8]{map[RangeKey]uint8{}, int(s.Ranges)},
		Locals:       FakeMap[[4]uint32, uint32]{map[[4]uint32]uint32{}, int(s.Locals)},
		VIPs:         FakeMap[[4]uint32, uint8]{map[[4]uint32]uint8{}, int(s.Frontends)},
		Targets:      FakeMap[TargetKey, uint64]{map[TargetKey]uint64{}, int(s.Frontends)},
		Ports:        make([]uint64, PortWords),
		Meta:         &Meta{},
		Nodes:        make([]Node, 2),
		Sets:         make([]uint64, s.Services*SetsPerService),
		Slots:        make([]uint32, s.Slots),
		Backends:     make([]Backend, s.Backends),
		Services:     make([]Service, s.Services),
		ServiceStats: make([]ServiceStats, s.Services),
		BackendStats: make([]uint64, s.Backends),
	}
}

// FakeMap behaves as a KernelMap.
type FakeMap[K comparable, V any] struct {
	entries map[K]V
	max     int
}

func (f FakeMap[K, V]) MaxEntries() int { return f.max }

func (f FakeMap[K, V]) Put(key K, value V) error {
	if _, known := f.entries[key]; !known && len(f.entries) >= f.max {
		return errFull
	}
	f.entries[key] = value
	return nil
}

func (f FakeMap[K, V]) PutAll(keys []K, values []V) (int, error) {
	for i, key := range keys {
		if err := f.Put(key, values[i]); err != nil {
			return i, err
		}
	}
	return len(keys), nil
}

func (f FakeMap[K, V]) DeleteAll(keys []K) (int, error) {
	for _, key := range keys {
		delete(f.entries, key)
	}
	return len(keys), nil
}

func (f FakeMap[K, V]) Delete(key K) error {
	delete(f.entries, key)
	return nil
}

func (f FakeMap[K, V]) Dump(fn func(K, V)) error {
	for key, value := range f.entries {
		fn(key, value)
	}
	return nil
}
