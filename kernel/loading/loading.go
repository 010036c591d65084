// SPDX-License-Identifier: Apache-2.0

// Package loading shares what several loads of BPF programs need. Loads come in groups, at the start of a process and when maps grow,
// so it is kept for a moment after each: to parse it again takes as long as to verify a program, and to keep it takes megabytes.
package loading

import (
	"sync"
	"time"

	"github.com/cilium/ebpf/btf"
)

// keepFor is longer than the steps between the loads of a start. It is shorter than the time after which a process returns the memory of
// its start to the kernel.
const keepFor = 2 * time.Second

// Value is made when it is needed, and dropped when nothing has used it for a moment.
type Value[T any] struct {
	make func() (T, error)

	mu    sync.Mutex
	value T
	timer *time.Timer // drops the value; nil if there is none
}

// NewValue returns a Value that is not made yet.
func NewValue[T any](make func() (T, error)) *Value[T] { return &Value[T]{make: make} }

// Get returns the value, which its callers share.
func (v *Value[T]) Get() (T, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.timer != nil {
		v.timer.Reset(keepFor)
		return v.value, nil
	}
	value, err := v.make()
	if err != nil {
		return value, err
	}
	v.value, v.timer = value, time.AfterFunc(keepFor, v.drop)
	return value, nil
}

func (v *Value[T]) drop() {
	var none T
	v.mu.Lock()
	defer v.mu.Unlock()
	v.value, v.timer = none, nil
}

var kernelTypes = NewValue(func() (*btf.Cache, error) { return btf.NewCache(), nil })

// KernelTypes returns the BTF of the kernel and its modules, which is read when it is used. A load with relocations reads all of it.
func KernelTypes() *btf.Cache {
	cache, _ := kernelTypes.Get() // it cannot fail
	return cache
}
