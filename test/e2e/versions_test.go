// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/binary"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// earlier are versions that leave something else in the kernel than this one, by what that is.
var earlier = map[string]string{
	"layout 6": "e4cef31cdc63cf6623ea3fc48f511c265552d279",
	"layout 7": "6d59523d8776616bf5b45fa97457bce8cd7599d3",
}

// again sends another request over each flow, and returns the flows with the answers as those to be had from now on. The servers have to be
// the same.
func again(t testing.TB, flows []flow) []flow {
	t.Helper()
	list := slices.Clone(flows)
	for i, f := range list {
		r, err := lab.AskConn(t.Context(), f)
		if err != nil || r.Server != f.first.Server || f.RemoteAddr().Network() == "tcp" && r != f.first {
			t.Errorf("long-lived flow to %s over %s: %v %v, first %v", f.RemoteAddr(), f.RemoteAddr().Network(), r, err, f.first)
		}
		list[i].first = r
	}
	return list
}

// TestEarlierVersions: the process of an earlier version is replaced by this one, and that by the earlier one, again and again, under
// traffic of clients outside. No new connection fails, and no old one breaks. This version keeps the source ports of UDP flows too.
func TestEarlierVersions(t *testing.T) {
	if testing.Short() {
		t.Skip("missing: the time to build other versions in short mode, which make test-all has")
	}
	kernel.NeedsPrograms(t)
	for what, commit := range earlier {
		t.Run(what, func(t *testing.T) {
			if _, err := exec.LookPath("go"); err != nil {
				lab.SkipOrFailProgram(t, fmt.Errorf("%w, which builds the earlier version", err))
			}
			program, err := binary.KubeProxyOf(commit, t.TempDir())
			switch {
			case errors.Is(err, binary.ErrNoHistory):
				t.Skipf("missing: %v", err)
			case err != nil:
				t.Fatal(err)
			}
			s := newStage(t)
			defer s.end()
			ways := outside(s.node)
			run := func(earlier bool) {
				t.Helper()
				next := of(s.node, s.dir)
				if earlier {
					next.Path = program
					next.Args[0] = filepath.Base(program)
				}
				if s.process != nil {
					s.Terminate(t)
				}
				s.process = begin(t, next)
				s.serves(t)
				maps, err := inspect.Open(s.node.CgroupPath())
				if err == nil {
					err = maps.Close()
				}
				if errors.Is(err, lbmap.ErrLayout) != earlier {
					t.Errorf("earlier version: %v; its maps: %v", earlier, err)
				}
			}
			run(true)
			long := openFlows(t, s.far.Sandbox, ways, s.here, s.there)
			w := lab.NewLoad(t)
			defer w.End()
			w.Use(s.far.Sandbox, ways, lab.Pace{Tries: 2})
			for range 3 {
				for _, earlier := range []bool{false, true} {
					run(earlier)
					if earlier {
						// It gives UDP flows new ports of this node, and ends what its maps have no room for.
						long = again(t, long)
					}
					checkAll(t, long)
				}
			}
			w.End()
			few(t, w)
		})
	}
}
