// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"errors"
	"fmt"

	"github.com/tandem-proxy/tandem/proxier/delta"
)

// objects are kernel objects without further state: addresses, set members. Add and delete
// are idempotent.
type objects[K comparable] interface {
	// List is called only by full syncs.
	List() ([]K, error)
	Add(K) error
	Delete(K) error
}

// counted are objects that several service ports may want.
type counted[K comparable] struct {
	*delta.Set[K]
	kernel objects[K]
}

func newCounted[K comparable](kernel objects[K]) *counted[K] {
	return &counted[K]{delta.NewSet[K](), kernel}
}

// read compares with the kernel.
func (c *counted[K]) read() error {
	list, err := c.kernel.List()
	if err != nil {
		return err
	}
	c.Found(list)
	return nil
}

// ensure adds those of a list that are not there; all of it is counted in.
func (c *counted[K]) ensure(list []K) error {
	for _, k := range list {
		if !c.IsPending(k) {
			continue
		}
		if err := c.kernel.Add(k); err != nil {
			c.Failed(k, err)
			return fmt.Errorf("add %v: %w", k, err)
		}
		c.Added(k)
	}
	return nil
}

// removeUnused deletes objects that are not desired, except those that kept selects.
func (c *counted[K]) removeUnused(kept func(K) bool) error {
	var errs []error
	for k, item := range c.Pending() {
		if item.Wanted() || kept != nil && kept(k) {
			continue
		}
		if err := c.kernel.Delete(k); err != nil {
			errs = append(errs, fmt.Errorf("delete %v: %w", k, err))
			c.Failed(k, err)
			continue
		}
		c.Removed(k)
	}
	return errors.Join(errs...)
}

// isThere reports whether an object is there, or may be.
func (c *counted[K]) isThere(k K) bool {
	item := c.Get(k)
	return item != nil && item.There()
}
