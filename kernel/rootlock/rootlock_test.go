// SPDX-License-Identifier: Apache-2.0

package rootlock

import (
	"errors"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
)

func TestAcquire(t *testing.T) {
	l := lab.NewT(t)
	one, two := l.Node("node1"), l.Node("node2")
	acquire := func(at *lab.Node, number uint16) (got *Lock, err error) {
		err = at.Do(func() error {
			got, err = Acquire(number)
			return err
		})
		return got, err
	}
	first, err := acquire(one, 7)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := acquire(one, 7); !errors.Is(err, ErrHeld) {
		t.Errorf("the same again: %v", err)
	}
	for name, at := range map[string]*lab.Node{"another number": one, "another namespace": two} {
		number := uint16(7)
		if at == one {
			number = 8
		}
		other, err := acquire(at, number)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := other.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := acquire(one, 7)
	if err != nil {
		t.Errorf("after the first was released: %v", err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
}
