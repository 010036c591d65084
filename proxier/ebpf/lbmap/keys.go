// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"
	"fmt"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
)

// CountEntries counts the entries of a hash map that may change meanwhile.
func CountEntries[K comparable, V any](m *ciliumebpf.Map) (count int, err error) {
	err = Each(m, func(K, V) { count++ })
	return count, err
}

// Keys lists the keys of a hash map that may change meanwhile.
func Keys[K comparable, V any](m *ciliumebpf.Map) (all []K, err error) {
	err = Each(m, func(key K, _ V) { all = append(all, key) })
	return all, err
}

// Each calls fn with the entries of a hash map that may change meanwhile.
func Each[K comparable, V any](m *ciliumebpf.Map, fn func(K, V)) error {
	if m.KeySize() != uint32(unsafe.Sizeof(*new(K))) || m.ValueSize() != uint32(unsafe.Sizeof(*new(V))) {
		return fmt.Errorf("%w: keys of %d and values of %d bytes", ErrLayout, m.KeySize(), m.ValueSize())
	}
	const chunk = 8192
	keys, values := make([]K, chunk), make([]V, chunk)
	var cursor ciliumebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if errors.Is(err, ciliumebpf.ErrNotSupported) {
			return eachOneByOne(m, fn)
		}
		if err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
			return err
		}
		for i := range n {
			fn(keys[i], values[i])
		}
		if err != nil { // there are no more
			return nil
		}
	}
}

// eachOneByOne is for kernels before 5.6. The iterator starts again when its key is deleted, so
// keys may come twice. In a busy map it may end early and miss keys.
func eachOneByOne[K comparable, V any](m *ciliumebpf.Map, fn func(K, V)) error {
	seen := map[K]V{}
	var key K
	var value V
	all := m.Iterate()
	for all.Next(&key, &value) {
		seen[key] = value
	}
	if err := all.Err(); err != nil && !errors.Is(err, ciliumebpf.ErrIterationAborted) {
		return err
	}
	for key, value := range seen {
		fn(key, value)
	}
	return nil
}

// ErrLayout says that the maps were written by another version.
var ErrLayout = errors.New("the maps have another layout")
