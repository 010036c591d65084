// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"

	ciliumebpf "github.com/cilium/ebpf"
)

// putAll writes all entries or, with an error, the first n. It takes one system call where the kernel has batches for this type of map.
func putAll[K, V any](m *ciliumebpf.Map, keys []K, values []V, flags ciliumebpf.MapUpdateFlags) (n int, err error) {
	if len(keys) > 1 {
		n, err = m.BatchUpdate(keys, values, &ciliumebpf.BatchOptions{ElemFlags: uint64(flags)})
		if err != nil && n == len(keys) {
			n = 0 // the kernel refused the whole batch, and did not update the count
		}
		if err == nil || !errors.Is(err, ciliumebpf.ErrNotSupported) {
			return n, err
		}
	}
	for n = range keys {
		if err := m.Update(&keys[n], &values[n], flags); err != nil {
			return n, err
		}
	}
	return len(keys), nil
}

// deleteAll deletes all entries or, with an error, the first n. Those that are gone already are no error.
func deleteAll[K any](m *ciliumebpf.Map, keys []K) (done int, err error) {
	for done < len(keys) {
		rest := keys[done:]
		n := 0
		if len(rest) > 1 {
			n, err = m.BatchDelete(rest, nil)
		} else if err = m.Delete(&rest[0]); err == nil {
			n = 1
		}
		switch {
		case err == nil:
		case errors.Is(err, ciliumebpf.ErrKeyNotExist):
			n++ // that one is gone already
		case errors.Is(err, ciliumebpf.ErrNotSupported):
			for i := range rest {
				if err := m.Delete(&rest[i]); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
					return done + i, err
				}
			}
			return len(keys), nil
		default:
			return done, err
		}
		done += min(n, len(rest))
	}
	return done, nil
}
