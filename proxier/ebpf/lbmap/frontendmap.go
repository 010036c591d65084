// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"

	ciliumebpf "github.com/cilium/ebpf"
)

// FrontendMap is the map of frontends, which is large. Deleting what is absent
// succeeds.
type FrontendMap interface {
	// Update writes all or, with an error, the first n.
	Update(keys []FrontendKey, values []FrontendValue) (n int, err error)
	Delete(keys []FrontendKey) error
	Lookup(key FrontendKey) (FrontendValue, bool, error)
	Dump(fn func(FrontendKey, FrontendValue)) error
	MaxEntries() int
}

// KernelFrontends is the real frontend map. Entries that exist are written in
// place, under their lock: an update without it replaces the element, and a
// program that walks the bucket may then find neither
// (bpf/frontend.h).
type KernelFrontends struct{ m *ciliumebpf.Map }

// NewFrontendMap is the map of the programs.
func NewFrontendMap(m *ciliumebpf.Map) *KernelFrontends { return &KernelFrontends{m} }

var lookupWhole = &ciliumebpf.BatchOptions{ElemFlags: uint64(ciliumebpf.LookupLock)}

func (k *KernelFrontends) MaxEntries() int { return int(k.m.MaxEntries()) }

func (k *KernelFrontends) Update(keys []FrontendKey, values []FrontendValue) (int, error) {
	return putAll(k.m, keys, values, ciliumebpf.UpdateLock)
}

func (k *KernelFrontends) Delete(keys []FrontendKey) error {
	_, err := deleteAll(k.m, keys)
	return err
}

func (k *KernelFrontends) Lookup(key FrontendKey) (FrontendValue, bool, error) {
	var value FrontendValue
	err := k.m.LookupWithFlags(&key, &value, ciliumebpf.LookupLock)
	if errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		return value, false, nil
	}
	return value, err == nil, err
}

func (k *KernelFrontends) Dump(fn func(FrontendKey, FrontendValue)) error {
	const chunk = 8192
	keys, values := make([]FrontendKey, chunk), make([]FrontendValue, chunk)
	var cursor ciliumebpf.MapBatchCursor
	for {
		n, err := k.m.BatchLookup(&cursor, keys, values, lookupWhole)
		for i := range n {
			fn(keys[i], values[i])
		}
		switch {
		case err == nil:
		case errors.Is(err, ciliumebpf.ErrKeyNotExist):
			return nil
		case errors.Is(err, ciliumebpf.ErrNotSupported):
			var key FrontendKey
			var value FrontendValue
			all := k.m.Iterate()
			for all.Next(&key, &value) {
				fn(key, value)
			}
			return all.Err()
		default:
			return err
		}
	}
}
