// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

func TestCgroupsBelow(t *testing.T) {
	l := lab.NewT(t)
	one, two := l.Node("node1"), l.Node("node2")
	own := func(n *lab.Node) uint64 {
		var st unix.Stat_t
		if err := unix.Stat(n.CgroupPath(), &st); err != nil {
			t.Fatal(err)
		}
		return st.Ino
	}
	ids, err := cgroupsBelow(one.CgroupPath())
	if err != nil || !ids.Has(own(one)) || ids.Has(own(two)) {
		t.Errorf("%v lacks %d or has %d: %v", ids, own(one), own(two), err)
	}
	if _, err := cgroupsBelow("/nowhere"); err == nil {
		t.Error("no error")
	}
}
