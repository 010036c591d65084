// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	mobyipvs "github.com/moby/ipvs"

	"github.com/tandem-proxy/tandem/test/lab"
)

// ready fails unless /readyz answers with this status and all of these texts.
func ready(n *lab.Node, want int, says ...string) func() error {
	return func() error {
		code, body, err := n.Get(context.Background(), 10256, "/readyz")
		if err != nil {
			return err
		}
		for _, text := range says {
			if !strings.Contains(body, text) {
				return fmt.Errorf("/readyz answers %d %s, without %s", code, body, text)
			}
		}
		if code != want {
			return fmt.Errorf("/readyz answers %d %s, want %d", code, body, want)
		}
		return nil
	}
}

// TestReady: a node is ready when its kernel translates a frontend of each family. It is
// not ready any more if the kernel state for that is removed.
func TestReady(t *testing.T) {
	for _, mode := range []string{"ebpf", "iptables", "ipvs"} {
		t.Run(mode, func(t *testing.T) {
			s := newStage(t)
			if mode == "ipvs" {
				needsIPVS(t, s.node)
			}
			s.start("--proxy-mode=" + mode)
			defer s.end()
			s.await(t, "ready", ready(s.node, 200, `"ready":true`, mode+`-IPv4","ok":true`, mode+`-IPv6","ok":true`, " leads to 10.244.", " leads to [fd00:10:244:"))
			spoil(t, s.node, mode)
			s.await(t, "not ready", ready(s.node, 503, `"programmed","ok":true`, mode+`-IPv4","ok":false`))
			s.start("--proxy-mode=" + mode)
			s.await(t, "ready again", ready(s.node, 200))
		})
	}
}

// TestReadyWithoutServices: without Services, there is nothing to probe.
func TestReadyWithoutServices(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	p := start(t, n, t.TempDir(), "-v=3")
	p.synced(t)
	p.await(t, "ready", ready(n, 200, `"programmed","ok":true`))
	_, body, err := n.Get(t.Context(), 10256, "/readyz")
	if err != nil || strings.Contains(body, "IPv4") {
		t.Errorf("/readyz answers %s, error %v", body, err)
	}
	p.Terminate(t)
	cleanup(t, n)
}

// spoil removes what translates IPv4 connections of this host.
func spoil(t *testing.T, n *lab.Node, mode string) {
	t.Helper()
	switch mode {
	case "ebpf":
		detach(t, n, ciliumebpf.AttachCGroupInet4Connect)
	case "iptables":
		if out, err := n.Command(context.Background(), "iptables-nft", "-w", "-t", "nat", "-F", "OUTPUT").CombinedOutput(); err != nil {
			t.Fatalf("iptables: %v: %s", err, out)
		}
	case "ipvs":
		err := n.Do(func() error {
			handle, err := mobyipvs.New("")
			if err != nil {
				return err
			}
			defer handle.Close()
			return handle.Flush()
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// detach removes all programs at a hook of the node's cgroup.
func detach(t *testing.T, n *lab.Node, at ciliumebpf.AttachType) {
	t.Helper()
	cgroup, err := os.Open(n.CgroupPath())
	if err != nil {
		t.Fatal(err)
	}
	defer cgroup.Close()
	there, err := link.QueryPrograms(link.QueryOptions{Target: int(cgroup.Fd()), Attach: at})
	if err != nil || len(there.Programs) == 0 {
		t.Fatalf("programs of %s: %v, %v", n.CgroupPath(), there, err)
	}
	for _, a := range there.Programs {
		p, err := ciliumebpf.NewProgramFromID(a.ID)
		if err != nil {
			t.Fatal(err)
		}
		if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(cgroup.Fd()), Program: p, Attach: at}); err != nil {
			t.Error(err)
		}
		p.Close()
	}
}
