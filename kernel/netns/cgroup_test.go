// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netns_test

import (
	"errors"
	"io/fs"
	"path"
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestInCgroups: the network namespaces of the processes in some cgroups are found, and neither those of other
// cgroups nor the caller's own.
func TestInCgroups(t *testing.T) {
	kernel.Since(t, 5, 14, "SO_NETNS_COOKIE")
	l := lab.NewT(t, lab.Options{Pause: true})
	n := l.Node("node1")
	a, b, other := n.Pod("a"), n.Pod("b"), n.Pod("other")
	want := map[string]uint64{}
	for _, p := range []*lab.Pod{a, b} {
		err := p.Do(func() (err error) { want[p.UID], err = netns.Cookie(); return err })
		if err != nil {
			t.Fatal(err)
		}
	}
	keyOf := func(cgroup string) string {
		for _, p := range []*lab.Pod{a, b} {
			if path.Base(cgroup) == "pod"+p.UID {
				return p.UID
			}
		}
		return ""
	}
	for _, from := range []*lab.Sandbox{n.Sandbox, other.Sandbox, b.Sandbox} {
		var got map[string][]uint64
		err := from.Do(func() (err error) { got, err = netns.InCgroups("/proc", keyOf); return err })
		if err != nil && !errors.Is(err, fs.ErrPermission) { // there may be processes with more privileges
			t.Fatal(err)
		}
		for uid, cookie := range want {
			if own := from == b.Sandbox && uid == b.UID; slices.Equal(got[uid], []uint64{cookie}) == own {
				t.Errorf("from %s: pod %s has %v, and its cookie is %d", from.Name, uid, got[uid], cookie)
			}
		}
		if len(got[other.UID]) > 0 {
			t.Errorf("from %s: a pod that was not asked for has %v", from.Name, got)
		}
	}
	if _, err := netns.InCgroups(t.TempDir()+"/none", keyOf); err == nil {
		t.Error("no error without processes")
	}
}
