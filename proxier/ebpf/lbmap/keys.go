// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"
	"fmt"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
)

// CountEntries counts the entries of a hash map that may change meanwhile.
func CountEntries[K comparable, V any](m *ciliumebpf.Map) (int, error) {
	keys, err := Keys[K, V](m)
	return len(keys), err
}

// Keys lists the keys of a hash map that may change meanwhile.
func Keys[K comparable, V any](m *ciliumebpf.Map) ([]K, error) {
	if m.KeySize() != uint32(unsafe.Sizeof(*new(K))) || m.ValueSize() != uint32(unsafe.Sizeof(*new(V))) {
		return nil, fmt.Errorf("%w: keys of %d and values of %d bytes", ErrLayout, m.KeySize(), m.ValueSize())
	}
	const chunk = 8192
	var all []K
	keys, values := make([]K, chunk), make([]V, chunk)
	var cursor ciliumebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		switch {
		case err == nil:
			all = append(all, keys[:n]...)
		case errors.Is(err, ciliumebpf.ErrKeyNotExist):
			return append(all, keys[:n]...), nil
		case errors.Is(err, ciliumebpf.ErrNotSupported):
			return keysOneByOne[K, V](m)
		default:
			return nil, err
		}
	}
}

// keysOneByOne is for kernels before 5.6. The iterator starts again when its key is deleted, so
// keys may come twice. In a busy map it may end early and miss keys.
func keysOneByOne[K comparable, V any](m *ciliumebpf.Map) ([]K, error) {
	seen := map[K]struct{}{}
	var key K
	var value V
	all := m.Iterate()
	for all.Next(&key, &value) {
		seen[key] = struct{}{}
	}
	if err := all.Err(); err != nil && !errors.Is(err, ciliumebpf.ErrIterationAborted) {
		return nil, err
	}
	list := make([]K, 0, len(seen))
	for key := range seen {
		list = append(list, key)
	}
	return list, nil
}

// ErrLayout says that the maps were written by another version.
var ErrLayout = errors.New("the maps have another layout")
