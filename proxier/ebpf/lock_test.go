// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestForeignLock: whoever can open the cgroup directory can hold the lock on it. That keeps no process from
// serving, while a process of Tandem that holds it does: also one of a version that has no other lock.
func TestForeignLock(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	hold, err := os.Open(one.CgroupPath())
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	if err := unix.Flock(int(hold.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Fatal(err)
	}
	n := newNode(t, one, l, Options{})
	n.OnServiceAdd(dualService())
	n.sync(t)
	if _, err := openOn(t, one, Options{}); !errors.Is(err, datapath.ErrBusy) {
		t.Errorf("opening beside a process that has the other lock alone: %v", err)
	}
	// As if an earlier version had been serving a moment ago.
	n.tier.successor.Beat()
	n.close()
	if _, err := openOn(t, one, Options{}); !errors.Is(err, datapath.ErrBusy) {
		t.Errorf("opening beside signs of life: %v", err)
	}
	if err := unix.Flock(int(hold.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	n.start(t, Options{})
}
