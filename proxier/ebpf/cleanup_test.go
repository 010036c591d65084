// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"os"
	"runtime"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestCleanup (I5): Cleanup removes all state of the proxy and nothing else.
func TestCleanup(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	foreign := attachForeign(t, one.CgroupPath())
	tier, err := openOn(t, one, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if found, err := datapath.FindAttached(tier.cgroup); err != nil || len(found) != 0 {
		t.Errorf("attached before the first sync: %v %v", found, err)
	}
	if err := tier.Sync(t.Context(), proxier.Update{Full: true}); err != nil {
		t.Fatal(err)
	}
	ours := objectsOf(t, tier)
	if left := existing(ours); len(left) != len(ours) {
		t.Fatalf("the check finds only %d of %d objects", len(left), len(ours))
	}
	if _, err := openOn(t, one, Options{}); !errors.Is(err, datapath.ErrBusy) {
		t.Errorf("opening while another process runs: %v", err)
	}
	if err := tier.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	tier.Close()
	waitFor(t, "the proxy's programs and maps to be freed", func() bool {
		// The library maps the programs' constants into memory until their owner is garbage
		// collected. When a process ends, that memory is freed anyway.
		runtime.GC()
		return len(existing(ours)) == 0
	})
	cgroup, err := os.Open(one.CgroupPath())
	if err != nil {
		t.Fatal(err)
	}
	defer cgroup.Close()
	result, err := link.QueryPrograms(link.QueryOptions{Target: int(cgroup.Fd()), Attach: ciliumebpf.AttachCGroupInet4Connect})
	if err != nil || len(result.Programs) != 1 || result.Programs[0].ID != foreign {
		t.Errorf("programs left: %+v %v, want only %d", result, err, foreign)
	}
}

// attachForeign attaches a foreign program.
func attachForeign(t *testing.T, path string) ciliumebpf.ProgramID {
	t.Helper()
	program, err := ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{
		Name: "tdm_foreign", Type: ciliumebpf.CGroupSockAddr, AttachType: ciliumebpf.AttachCGroupInet4Connect,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}, License: "GPL",
	})
	if err != nil {
		t.Fatal(err)
	}
	attachment, err := link.AttachCgroup(link.CgroupOptions{Path: path, Attach: ciliumebpf.AttachCGroupInet4Connect, Program: program})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		attachment.Close()
		program.Close()
	})
	info, err := program.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return id
}

// object is a program or map in the kernel.
type object struct {
	program ciliumebpf.ProgramID
	m       ciliumebpf.MapID
}

// objectsOf returns the programs of a tier, and the maps they use.
func objectsOf(t testing.TB, tier *Tier) (list []object) {
	t.Helper()
	seen := map[object]bool{}
	for _, p := range tier.hooks.Programs {
		if p == nil {
			continue // not asked for
		}
		info, err := p.Info()
		if err != nil {
			t.Fatal(err)
		}
		id, _ := info.ID()
		seen[object{program: id}] = true
		maps, _ := info.MapIDs()
		for _, id := range maps {
			seen[object{m: id}] = true
		}
	}
	for o := range seen {
		list = append(list, o)
	}
	return list
}

// existing returns those objects that the kernel still has.
func existing(list []object) (left []object) {
	for _, o := range list {
		if o.m != 0 {
			if m, err := ciliumebpf.NewMapFromID(o.m); err == nil {
				m.Close()
				left = append(left, o)
			}
		} else if p, err := ciliumebpf.NewProgramFromID(o.program); err == nil {
			p.Close()
			left = append(left, o)
		}
	}
	return left
}

func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("timeout while waiting for %s", what)
		}
		runtime.Gosched()
		time.Sleep(time.Millisecond)
	}
}
