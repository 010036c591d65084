// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// pagesPerWindow is how much of an array is mapped at a time: mapping all would count as memory
// of this process.
const pagesPerWindow = 64

// span are elements of an array from one place on.
type span[T any] struct {
	first uint32
	list  []T
}

// at is the element at a place, which the span has.
func (s span[T]) at(place uint32) *T { return &s.list[place-s.first] }

// has reports whether the span has an element.
func (s span[T]) has(place uint32) bool {
	return place >= s.first && place-s.first < uint32(len(s.list))
}

// perWindow is the number of elements in a window. Elements divide a page.
func perWindow[T any]() uint32 {
	var element T
	return uint32(pagesPerWindow * os.Getpagesize() / int(unsafe.Sizeof(element)))
}

// window calls fn with a part of an array that starts at a page and has a place; before it,
// it has as many elements as asked for, as far as there are any. The memory is unmapped
// afterwards.
func window[T any](m *ciliumebpf.Map, place, before uint32, write bool, fn func(span[T]) error) error {
	var element T
	size, page := uint32(unsafe.Sizeof(element)), uint32(os.Getpagesize())
	first := place - min(place, before)
	first -= first % (page / size)
	n := min(perWindow[T](), m.MaxEntries()-first)
	protection := unix.PROT_READ
	if write {
		protection |= unix.PROT_WRITE
	}
	length := (n*size + page - 1) &^ (page - 1)
	b, err := unix.Mmap(m.FD(), int64(first)*int64(size), int(length), protection, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the memory of %s: %w", m, err)
	}
	err = fn(span[T]{first, unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n)})
	if unmapErr := unix.Munmap(b); unmapErr != nil {
		return errors.Join(err, fmt.Errorf("unmap the memory of %s: %w", m, unmapErr))
	}
	return err
}

// eachWindow calls fn with an array, window after window.
func eachWindow[T any](m *ciliumebpf.Map, write bool, fn func(span[T]) error) error {
	for first := uint32(0); first < m.MaxEntries(); first += perWindow[T]() {
		if err := window(m, first, 0, write, fn); err != nil {
			return err
		}
	}
	return nil
}
