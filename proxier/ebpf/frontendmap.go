// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"

	ciliumebpf "github.com/cilium/ebpf"
)

// frontendMap is the one table that is not an array. Deleting what is absent
// succeeds.
type frontendMap interface {
	// Update writes all or, with an error, the first n.
	Update(keys []frontendKey, values []frontendValue) (n int, err error)
	Delete(keys []frontendKey) error
	Lookup(key frontendKey) (frontendValue, bool, error)
	Dump(fn func(frontendKey, frontendValue)) error
	MaxEntries() int
}

// kernelFrontends is the real frontend map. Entries that exist are written in
// place, under their lock: an update without it replaces the element, and a
// program that is just walking the bucket may then find neither
// (bpf/frontend.h).
type kernelFrontends struct{ m *ciliumebpf.Map }

// newKernelFrontends is the map of the programs.
func newKernelFrontends(m *ciliumebpf.Map) *kernelFrontends { return &kernelFrontends{m} }

var (
	updateInPlace = &ciliumebpf.BatchOptions{ElemFlags: uint64(ciliumebpf.UpdateLock)}
	lookupWhole   = &ciliumebpf.BatchOptions{ElemFlags: uint64(ciliumebpf.LookupLock)}
)

func (k *kernelFrontends) MaxEntries() int { return int(k.m.MaxEntries()) }

func (k *kernelFrontends) Update(keys []frontendKey, values []frontendValue) (int, error) {
	if len(keys) == 1 {
		if err := k.m.Update(&keys[0], &values[0], ciliumebpf.UpdateLock); err != nil {
			return 0, err
		}
		return 1, nil
	}
	n, err := k.m.BatchUpdate(keys, values, updateInPlace)
	if err != nil && n == len(keys) {
		n = 0 // refused as a whole, and the count left as it was
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

func (k *kernelFrontends) Delete(keys []frontendKey) error {
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

func (k *kernelFrontends) Lookup(key frontendKey) (frontendValue, bool, error) {
	var value frontendValue
	err := k.m.LookupWithFlags(&key, &value, ciliumebpf.LookupLock)
	if errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		return value, false, nil
	}
	return value, err == nil, err
}

func (k *kernelFrontends) Dump(fn func(frontendKey, frontendValue)) error {
	const chunk = 8192
	keys, values := make([]frontendKey, chunk), make([]frontendValue, chunk)
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
			var key frontendKey
			var value frontendValue
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
