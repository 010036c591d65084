// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"errors"
	"fmt"
)

// objects are something in the kernel that is there or not. To add what is there
// succeeds, and so does to delete what is not.
type objects[K comparable] interface {
	// List is asked for in full syncs alone.
	List() ([]K, error)
	Add(K) error
	Delete(K) error
}

// ledger is what is wanted of objects, by how many, and what is there.
type ledger[K comparable] struct {
	kernel objects[K]
	wanted map[K]int
	// there is false of what may be there: a message about it has failed.
	there map[K]bool
	// going are those that nobody wants any more, but that are there.
	going map[K]struct{}
}

func newLedger[K comparable](kernel objects[K]) *ledger[K] {
	return &ledger[K]{kernel: kernel, wanted: map[K]int{}, there: map[K]bool{}, going: map[K]struct{}{}}
}

// read compares with the kernel.
func (l *ledger[K]) read() error {
	list, err := l.kernel.List()
	if err != nil {
		return err
	}
	clear(l.there)
	clear(l.going)
	for _, k := range list {
		l.there[k] = true
		if l.wanted[k] == 0 {
			l.going[k] = struct{}{}
		}
	}
	return nil
}

// count counts in or out.
func (l *ledger[K]) count(list []K, by int) {
	for _, k := range list {
		l.wanted[k] += by
		if l.wanted[k] > 0 {
			delete(l.going, k)
			continue
		}
		delete(l.wanted, k)
		if has(l.there, k) {
			l.going[k] = struct{}{}
		}
	}
}

// ensure adds what is not there; all of it is counted in.
func (l *ledger[K]) ensure(list []K) error {
	for _, k := range list {
		if l.there[k] {
			continue
		}
		err := l.kernel.Add(k)
		if l.there[k] = err == nil; err != nil {
			return fmt.Errorf("add %v: %w", k, err)
		}
	}
	return nil
}

// settle deletes what is going, but for what is kept.
func (l *ledger[K]) settle(kept func(K) bool) error {
	var errs []error
	for k := range l.going {
		if kept != nil && kept(k) {
			continue
		}
		if err := l.kernel.Delete(k); err != nil {
			errs = append(errs, fmt.Errorf("delete %v: %w", k, err))
			l.there[k] = false
			continue
		}
		delete(l.there, k)
		delete(l.going, k)
	}
	return errors.Join(errs...)
}
