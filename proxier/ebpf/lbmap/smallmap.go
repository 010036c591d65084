// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"

	ciliumebpf "github.com/cilium/ebpf"
)

// SmallMap is a map whose entries programs do not find while they are replaced. Deleting what is absent
// succeeds.
type SmallMap[K comparable, V any] interface {
	Put(K, V) error
	// PutAll writes all or, with an error, the first n.
	PutAll([]K, []V) (n int, err error)
	Delete(K) error
	// DeleteAll deletes all or, with an error, the first n.
	DeleteAll([]K) (n int, err error)
	Dump(fn func(K, V)) error
	MaxEntries() int
}

// KernelMap is a SmallMap of the programs.
type KernelMap[K comparable, V any] struct{ m *ciliumebpf.Map }

func (k KernelMap[K, V]) MaxEntries() int { return int(k.m.MaxEntries()) }

func (k KernelMap[K, V]) Put(key K, value V) error { return k.m.Put(&key, &value) }

func (k KernelMap[K, V]) PutAll(keys []K, values []V) (int, error) {
	return putAll(k.m, keys, values, 0)
}

func (k KernelMap[K, V]) DeleteAll(keys []K) (int, error) { return deleteAll(k.m, keys) }

func (k KernelMap[K, V]) Delete(key K) error {
	if err := k.m.Delete(&key); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

func (k KernelMap[K, V]) Dump(fn func(K, V)) error {
	var key K
	var value V
	all := k.m.Iterate()
	for all.Next(&key, &value) {
		fn(key, value)
	}
	return all.Err()
}
