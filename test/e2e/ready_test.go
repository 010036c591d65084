// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	mobyipvs "github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/foreign"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
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

// TestReady: a node is ready when its kernel translates a frontend of each family. Kernel state
// that another process removes is restored within seconds, and told by a metric, the log and an
// Event.
func TestReady(t *testing.T) {
	for _, mode := range []string{"ebpf", "iptables", "ipvs"} {
		t.Run(mode, func(t *testing.T) {
			s := newStage(t)
			if mode == "ipvs" {
				upstream.NeedsIPVS(t, s.node)
			}
			s.start("--proxy-mode=" + mode)
			defer s.end()
			s.await(t, "ready", ready(s.node, 200, `"ready":true`, mode+`-IPv4","ok":true`, mode+`-IPv6","ok":true`, " leads to 10.244.", " leads to [fd00:10:244:"))
			if mode == "ipvs" {
				// Only a full sync notices, which a failed probe requests.
				spoil(t, s.node, mode)
				s.await(t, "not ready", ready(s.node, 503, `"programmed","ok":true`, mode+`-IPv4","ok":false`))
				s.await(t, "ready again", ready(s.node, 200))
				return
			}
			start := time.Now()
			spoil(t, s.node, mode)
			state := map[string]string{"ebpf": "cgroup-programs", "iptables": "rules"}[mode]
			s.await(t, "the repair", func() error { return s.repaired(state) })
			if took := time.Since(start); took > 4*time.Second {
				t.Errorf("the repair took %v", took)
			}
			if _, err := s.node.Ask(t.Context(), "tcp", targets()["tcp4"]); err != nil {
				t.Errorf("after the repair: %v", err)
			}
			s.await(t, "the log", s.Says("Restored kernel state that another process removed or made ineffective"))
			s.await(t, "ready again", ready(s.node, 200))
		})
	}
}

// repaired fails unless the metric of repairs counts one of this kind.
func (s *stage) repaired(state string) error {
	text, err := s.node.Fetch(context.Background(), 10249, "/metrics")
	if err != nil {
		return err
	}
	if !strings.Contains(text, fmt.Sprintf("tandem_repairs_total{state=%q} 1\n", state)) {
		return fmt.Errorf("no repair of %s is counted", state)
	}
	return nil
}

// TestNotReady: a foreign program that refuses connections of sockets makes the node not ready, and
// is named.
func TestNotReady(t *testing.T) {
	s := newStage(t)
	s.start("--proxy-mode=ebpf")
	defer s.end()
	s.await(t, "ready", ready(s.node, 200, `"uplink-eth0","ok":true`))
	undo := refuse(t, s.node)
	s.await(t, "not ready", ready(s.node, 503, `ebpf-IPv4","ok":false`, "operation not permitted", "refuser (id "))
	s.await(t, "a full sync", s.Says("A probe of this node's Services failed; comparing everything with the kernel"))
	undo()
	s.await(t, "ready again", ready(s.node, 200))
}

// TestBypassed: a node is not ready while software puts a program of its own ahead of the proxy's again after each repair, and an Event says
// so. Once that is gone, it is ready.
func TestBypassed(t *testing.T) {
	kernel.NeedsPrograms(t)
	kernel.Needs(t, capabilities.TCX)
	s := newStage(t)
	defer s.end()
	api := fakeapi.New(append(endpoints(s.here, s.there), everyKind(), upstream.NodeObject(s.node))...)
	p := startWith(t, s.node, api)
	s.process = p
	p.synced(t)
	p.await(t, "ready", ready(s.node, 200, `"ready":true`))
	var undo []func() error
	for repaired := range 4 {
		remove, err := foreign.PutFirst(s.node.Sandbox, lab.Uplink, tc.TCX, tc.Ingress)
		if err != nil {
			t.Fatal(err)
		}
		undo = append(undo, remove)
		if repaired < 3 {
			p.await(t, "a repair", func() error {
				_, body, err := s.node.Get(t.Context(), config.MetricsPort, "/metrics")
				if want := fmt.Sprintf("tandem_repairs_total{state=%q} %d\n", proxier.RepairedOrder, repaired+1); err != nil || !strings.Contains(body, want) {
					return fmt.Errorf("the metrics lack %s: %w", want, err)
				}
				return nil
			})
		}
	}
	p.await(t, "not ready", ready(s.node, 503, `"ready":false`, "another program runs first: foreign (id "))
	p.await(t, "its Event", func() error { return hasEvent(api, "Warning ProgramsBypassed") })
	for _, remove := range undo {
		if err := remove(); err != nil {
			t.Fatal(err)
		}
	}
	p.await(t, "ready again", ready(s.node, 200, `"ready":true`))
}

// TestProbeUnasked: where nothing asks /readyz, Services are probed as well: a metric shows that one fails, and a full sync follows.
func TestProbeUnasked(t *testing.T) {
	s := newStage(t)
	s.start("--proxy-mode=ebpf")
	defer s.end()
	s.await(t, "a probe that succeeds", shows(s.node, `tandem_check_ok{check="ebpf-IPv4"} 1`))
	undo := refuse(t, s.node)
	s.await(t, "a probe that fails", shows(s.node, `tandem_check_ok{check="ebpf-IPv4"} 0`))
	s.await(t, "a full sync", s.Says("A probe of this node's Services failed; comparing everything with the kernel"))
	undo()
	s.await(t, "a probe that succeeds again", shows(s.node, `tandem_check_ok{check="ebpf-IPv4"} 1`))
}

// TestUplinkNotReady: programs do not know an address of the node, so that a packet to its NodePort is led to no endpoint. The node is not ready, and
// names the uplink and the frontend; a full sync repairs it. An uplink whose packets the host does not route is no reason.
func TestUplinkNotReady(t *testing.T) {
	s := newStage(t)
	writeManifests(t, s.dir, loadBalancer, s.there)
	ip := func(commands ...string) {
		t.Helper()
		for _, command := range commands {
			if out, err := s.node.Command(t.Context(), "ip", strings.Fields(command)...).CombinedOutput(); err != nil {
				t.Fatalf("ip %s: %v: %s", command, err, out)
			}
		}
	}
	ip("link add eth1 type veth peer name eth1p", "addr add 192.168.77.1/24 dev eth1", "link set eth1 up", "link set eth1p up")
	s.start("--proxy-mode=ebpf")
	defer s.end()
	s.await(t, "ready", ready(s.node, 200, `{"name":"uplink-eth0","ok":true,"detail":"`, `; `, `{"name":"uplink-eth1","ok":true,"detail":"`, " leads to "+s.there.Addr4.String(), " leads to ["+s.there.Addr6.String()))
	ip("rule add iif eth1 pref 1 prohibit")
	s.await(t, "ready without routes", ready(s.node, 200, `{"name":"uplink-eth0","ok":true,"detail":"`, `{"name":"uplink-eth1","ok":true}`))
	ip("rule del iif eth1 pref 1 prohibit")
	s.await(t, "ready by both", ready(s.node, 200, `{"name":"uplink-eth0","ok":true,"detail":"`, `{"name":"uplink-eth1","ok":true,"detail":"`))

	local := mapOf(t, s.node, "tdm_local")
	if err := local.Delete(lbmap.FromAddr(s.node.Addr4)); err != nil {
		t.Fatal(err)
	}
	s.await(t, "not ready", ready(s.node, 503, `{"name":"uplink-eth0","ok":false,"detail":"`, " of shop/web:", ": its program does not forward a packet from 192.0.2.1:"))
	s.await(t, "a full sync", s.Says("A probe of this node's Services failed; comparing everything with the kernel"))
	s.await(t, "ready again", ready(s.node, 200, `{"name":"uplink-eth0","ok":true,"detail":"`))
}

// mapOf opens a map of the program on the uplink of a node.
func mapOf(t *testing.T, n *lab.Node, name string) (found *ciliumebpf.Map) {
	t.Helper()
	uplink, err := n.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	err = n.Do(func() error {
		list, err := tc.Find(uplink.Attrs().Index, tc.Ingress, datapath.IsOwnProgram)
		if err != nil {
			return err
		}
		defer tc.Close(list)
		for _, a := range list {
			info, err := a.Program.Info()
			if err != nil {
				return err
			}
			ids, _ := info.MapIDs()
			for _, id := range ids {
				m, err := ciliumebpf.NewMapFromID(id)
				if err != nil {
					return err
				}
				if about, err := m.Info(); err == nil && about.Name == name {
					found = m
					return nil
				}
				_ = m.Close()
			}
		}
		return fmt.Errorf("no map %s", name)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { found.Close() })
	return found
}

// refuse attaches a foreign program to the node's cgroup that refuses connections to 10.0.0.0/8.
func refuse(t *testing.T, n *lab.Node) (undo func()) {
	t.Helper()
	cgroup, err := os.Open(n.CgroupPath())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cgroup.Close() })
	const at = ciliumebpf.AttachCGroupInet4Connect
	const userIP4 = 4 // in struct bpf_sock_addr; network byte order
	program, err := ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{
		Name: "refuser", Type: ciliumebpf.CGroupSockAddr, AttachType: at, License: "MIT",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, userIP4, asm.Word),
			asm.HostTo(asm.BE, asm.R2, asm.Word),
			asm.RSh.Imm(asm.R2, 24),
			asm.Mov.Imm(asm.R0, 1),
			asm.JNE.Imm(asm.R2, 10, "return"),
			asm.Mov.Imm(asm.R0, 0),
			asm.Return().WithSymbol("return"),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Close() })
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(cgroup.Fd()), Program: program, Attach: at, Flags: unix.BPF_F_ALLOW_MULTI}); err != nil {
		t.Fatal(err)
	}
	undo = sync.OnceFunc(func() {
		if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(cgroup.Fd()), Program: program, Attach: at}); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(undo)
	return undo
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
