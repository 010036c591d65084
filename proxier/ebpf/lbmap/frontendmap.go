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

var (
	updateInPlace = &ciliumebpf.BatchOptions{ElemFlags: uint64(ciliumebpf.UpdateLock)}
	lookupWhole   = &ciliumebpf.BatchOptions{ElemFlags: uint64(ciliumebpf.LookupLock)}
)

func (k *KernelFrontends) MaxEntries() int { return int(k.m.MaxEntries()) }

func (k *KernelFrontends) Update(keys []FrontendKey, values []FrontendValue) (int, error) {
	if len(keys) == 1 {
		if err := k.m.Update(&keys[0], &values[0], ciliumebpf.UpdateLock); err != nil {
			return 0, err
		}
		return 1, nil
	}
	n, err := k.m.BatchUpdate(keys, values, updateInPlace)
	if err != nil && n == len(keys) {
		n = 0 // the kernel refused the whole batch, and did not update the count
	}
	if err != nil && errors.Is(err, ciliumebpf.ErrNotSupported) {
		for n = range keys {
			if err := k.m.Update(&keys[n], &values[n], ciliumebpf.UpdateLock); err != nil {
				return n, err
			}
		}
		return len(keys), nil
	}
	return n, err
}

func (k *KernelFrontends) Delete(keys []FrontendKey) error {
	for len(keys) > 0 {
		n, err := 0, error(nil)
		if len(keys) > 1 {
			n, err = k.m.BatchDelete(keys, nil)
		} else if err = k.m.Delete(&keys[0]); err == nil {
			n = 1
		}
		switch {
		case err == nil:
		case errors.Is(err, ciliumebpf.ErrKeyNotExist):
			n++ // that one is gone already
		case errors.Is(err, ciliumebpf.ErrNotSupported):
			for i := range keys {
				if err := k.m.Delete(&keys[i]); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
					return err
				}
			}
			return nil
		default:
			return err
		}
		keys = keys[min(n, len(keys)):]
	}
	return nil
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
