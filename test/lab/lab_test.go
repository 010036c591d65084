// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

var bg = context.Background()

func mustServe(tb testing.TB, s *lab.Sandbox, port uint16) (tcp, udp *lab.Server) {
	tb.Helper()
	tcp, err := s.ServeTCP(port)
	if err != nil {
		tb.Fatal(err)
	}
	if udp, err = s.ServeUDP(port); err != nil {
		tb.Fatal(err)
	}
	return tcp, udp
}

func mapped(a netip.Addr) netip.Addr { return netip.AddrFrom16(a.As16()) }

func TestConnectivity(t *testing.T) {
	l := lab.NewT(t)
	n1, n2 := l.Node("node1"), l.Node("node2")
	a, a2, b := n1.Pod("a"), n1.Pod("a2"), n2.Pod("b")
	out := l.Client("outside")

	all := []*lab.Sandbox{n1.Sandbox, n2.Sandbox, a.Sandbox, a2.Sandbox, b.Sandbox, out.Sandbox}
	for _, s := range all {
		mustServe(t, s, 8080)
	}
	for _, from := range all {
		for _, to := range all {
			for _, network := range []string{"tcp", "udp"} {
				for _, addr := range []netip.Addr{to.Addr4, to.Addr6, mapped(to.Addr4)} {
					got, err := from.Ask(bg, network, netip.AddrPortFrom(addr, 8080))
					if err != nil {
						t.Errorf("%s -> %s: %v", from.Name, to.Name, err)
						continue
					}
					want := from.Addr6
					if addr.Unmap().Is4() {
						want = from.Addr4
					}
					// A host's connections to itself have the same source and destination address.
					if got.Server != to.Name || got.Peer.Addr() != want {
						t.Errorf("%s -> %s over %s %s: answer %+v, want from %s, seen as %s",
							from.Name, to.Name, network, addr, got, to.Name, want)
					}
				}
			}
		}
	}
}

func TestAddressPlan(t *testing.T) {
	l := lab.NewT(t)
	var got []string
	for range 2 {
		n := l.Node(fmt.Sprintf("node%d", len(l.Nodes())+1))
		p := n.Pod("p")
		got = append(got, fmt.Sprintf("%s %s %s %s %s %s", n.Addr4, n.Addr6, n.PodPrefix4, n.PodPrefix6, p.Addr4, p.Addr6))
	}
	c := l.Client("c")
	got = append(got, fmt.Sprintf("%s %s", c.Addr4, c.Addr6))
	want := []string{
		"172.18.0.1 fd00:18::1 10.244.1.0/24 fd00:10:244:1::/64 10.244.1.1 fd00:10:244:1::1",
		"172.18.0.2 fd00:18::2 10.244.2.0/24 fd00:10:244:2::/64 10.244.2.1 fd00:10:244:2::1",
		"198.51.100.1 2001:db8:51:100::1",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("addresses (-want +got):\n%s", d)
	}
}

// Untranslated packets are dropped without an ICMP error, and only those.
func TestServiceAddressesAreDropped(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	p := n.Pod("p")
	c := l.Client("outside")
	ctx, cancel := context.WithTimeout(bg, 100*time.Millisecond)
	defer cancel()
	for _, from := range []*lab.Sandbox{n.Sandbox, p.Sandbox, c.Sandbox} {
		for _, vip := range []string{"10.96.0.10", "fd00:10:96::a", "203.0.113.5", "2001:db8:203:113::5"} {
			for _, network := range []string{"tcp", "udp"} {
				_, err := from.Ask(ctx, network, netip.AddrPortFrom(netip.MustParseAddr(vip), 80))
				if !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%s -> %s: got %v, want a timeout", from.Name, vip, err)
				}
			}
		}
	}
}

func TestAnnounce(t *testing.T) {
	l := lab.NewT(t)
	n1, n2 := l.Node("node1"), l.Node("node2")
	c := l.Client("outside")
	for _, vip := range []string{"203.0.113.5", "2001:db8:203:113::5"} {
		addr := netip.MustParseAddr(vip)
		prefix := netip.PrefixFrom(addr, addr.BitLen())
		for _, n := range []*lab.Node{n1, n2} {
			// The node accepts the address as if a proxy translated it.
			ip(t, n.Sandbox, "addr", "add", prefix.String(), "dev", "lo", "nodad")
			if _, err := n.ServeTCP(8000 + uint16(len(vip))); err != nil {
				t.Fatal(err)
			}
		}
		to := netip.AddrPortFrom(addr, 8000+uint16(len(vip)))
		for _, n := range []*lab.Node{n1, n2} {
			if err := l.Announce(prefix, n); err != nil {
				t.Fatal(err)
			}
			if r, err := c.Ask(bg, "tcp", to); err != nil || r.Server != n.Name {
				t.Errorf("%s announced by %s: got %+v, %v", vip, n.Name, r, err)
			}
		}
		if err := l.Announce(prefix, n1, n2); err != nil {
			t.Errorf("announce from two nodes: %v", err)
		}
		if err := l.Announce(prefix); err != nil {
			t.Errorf("withdraw: %v", err)
		}
		if err := l.Announce(prefix); err != nil {
			t.Errorf("withdraw again: %v", err)
		}
	}
}

func ip(tb testing.TB, s *lab.Sandbox, args ...string) string {
	tb.Helper()
	out, err := s.Command(bg, "ip", args...).CombinedOutput()
	if err != nil {
		tb.Fatalf("ip %s in %s: %v\n%s", strings.Join(args, " "), s.Name, err, out)
	}
	return string(out)
}

// denyConnect attaches a connect4 program that denies one address.
func denyConnect(t *testing.T, cgroup string, addr netip.Addr) {
	t.Helper()
	a4 := addr.As4()
	const userIP4 = 4 // offset in struct bpf_sock_addr
	prog, err := ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{
		Name:       "deny_connect4",
		Type:       ciliumebpf.CGroupSockAddr,
		AttachType: ciliumebpf.AttachCGroupInet4Connect,
		License:    "Apache-2.0",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R1, asm.R1, userIP4, asm.Word),
			asm.Mov.Imm(asm.R0, 1),
			asm.LoadImm(asm.R2, int64(binary.NativeEndian.Uint32(a4[:])), asm.DWord),
			asm.JNE.Reg(asm.R1, asm.R2, "out"),
			asm.Mov.Imm(asm.R0, 0),
			asm.Return().WithSymbol("out"),
		},
	})
	if err != nil {
		t.Fatalf("load program: %v", err)
	}
	t.Cleanup(func() { prog.Close() })
	att, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: ciliumebpf.AttachCGroupInet4Connect, Program: prog})
	if err != nil {
		t.Fatalf("attach program: %v", err)
	}
	t.Cleanup(func() { att.Close() })
}

// A program on a node's cgroup covers everything on the node, and nothing else.
func TestCgroupCoversNode(t *testing.T) {
	l := lab.NewT(t)
	n1, n2 := l.Node("node1"), l.Node("node2")
	p1, p2 := n1.Pod("p1"), n2.Pod("p2")
	out := l.Client("outside")
	mustServe(t, p2.Sandbox, 80)
	to := netip.AddrPortFrom(p2.Addr4, 80)
	early, err := p1.Dial(bg, "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer early.Close()
	denyConnect(t, n1.CgroupPath(), p2.Addr4)

	for _, tc := range []struct {
		from   *lab.Sandbox
		denied bool
	}{
		{p1.Sandbox, true}, {n1.Sandbox, true},
		{p2.Sandbox, false}, {n2.Sandbox, false}, {out.Sandbox, false},
	} {
		_, err := tc.from.Ask(bg, "tcp", to)
		if denied := errors.Is(err, unix.EPERM); denied != tc.denied || (!denied && err != nil) {
			t.Errorf("in-process client in %s: got %v, want denied: %v", tc.from.Name, err, tc.denied)
		}
		text, err := tc.from.Command(bg, "bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/80 && echo x >&3 && read -r line <&3 && echo $line", p2.Addr4)).CombinedOutput()
		if denied := bytes.Contains(text, []byte("Operation not permitted")); denied != tc.denied || (!denied && err != nil) {
			t.Errorf("spawned client in %s: got %q, %v, want denied: %v", tc.from.Name, text, err, tc.denied)
		}
	}
	if _, err := lab.AskConn(bg, early); err != nil {
		t.Errorf("connection from before: %v", err)
	}
	if _, err := p1.Ask(bg, "tcp", netip.AddrPortFrom(p2.Addr6, 80)); err != nil {
		t.Errorf("other address: %v", err)
	}
}

func TestSpawnServer(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	p, c := n.Pod("server"), n.Pod("client")
	srv, err := p.SpawnServer(80)
	if err != nil {
		t.Fatal(err)
	}
	to := netip.AddrPortFrom(p.Addr6, srv.Port)
	conn, err := c.Dial(bg, "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 2 {
		if r, err := lab.AskConn(bg, conn); err != nil || r.Server != "server" {
			t.Errorf("tcp: got %+v, %v", r, err)
		}
	}
	if r, err := c.Ask(bg, "udp", to); err != nil || r.Server != "server" {
		t.Errorf("udp: got %+v, %v", r, err)
	}
	if err := srv.Close(); err != nil {
		t.Error(err)
	}
	if _, err := lab.AskConn(bg, conn); err == nil {
		t.Error("the connection outlived the server process")
	}
	if _, err := c.Ask(bg, "tcp", to); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("server is gone: got %v, want ECONNREFUSED", err)
	}
}

func TestServerCountersAndClose(t *testing.T) {
	l := lab.NewT(t)
	p := l.Node("node1").Pod("p")
	tcp, udp := mustServe(t, p.Sandbox, 0)
	conn, err := p.Dial(bg, "tcp", netip.AddrPortFrom(p.Addr4, tcp.Port))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 3 {
		if _, err := lab.AskConn(bg, conn); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Ask(bg, "udp", netip.AddrPortFrom(p.Addr6, udp.Port)); err != nil {
			t.Fatal(err)
		}
	}
	if c, r, u := tcp.Conns.Load(), tcp.Requests.Load(), udp.Requests.Load(); c != 1 || r != 3 || u != 3 {
		t.Errorf("got %d connections, %d and %d requests; want 1, 3 and 3", c, r, u)
	}
	for range 2 {
		if err := errors.Join(tcp.Close(), udp.Close()); err != nil {
			t.Error(err)
		}
	}
	if _, err := lab.AskConn(bg, conn); err == nil {
		t.Error("the connection outlived its server")
	}
}

func TestDo(t *testing.T) {
	l := lab.NewT(t)
	p := l.Node("node1").Pod("p")
	ns := func() (s string, err error) {
		err = p.Do(func() error {
			s, err = os.Readlink("/proc/thread-self/ns/net")
			return err
		})
		return s, err
	}
	ino, err := p.NetNSInode()
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("net:[%d]", ino)
	if got, err := ns(); err != nil || got != want {
		t.Errorf("namespace: got %s, %v; want %s", got, err, want)
	}
	sentinel := errors.New("x")
	if err := p.Do(func() error { return sentinel }); !errors.Is(err, sentinel) {
		t.Errorf("error: got %v", err)
	}
	if err := p.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("Goexit was not reported")
	}
	func() {
		defer func() {
			if r := recover(); r == nil {
				t.Error("the panic did not reach the caller")
			}
		}()
		_ = p.Do(func() error { panic("x") })
	}()
	// Nested and parallel calls each have a thread.
	errs := make(chan error)
	for range 8 {
		go func() {
			errs <- p.Do(func() error { return p.Do(func() error { return nil }) })
		}()
	}
	for range 8 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if got, err := ns(); err != nil || got != want {
		t.Errorf("namespace afterwards: got %s, %v; want %s", got, err, want)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if err := p.Do(func() error { return nil }); !errors.Is(err, lab.ErrClosed) {
		t.Errorf("after Close: got %v, want ErrClosed", err)
	}
}

func TestRemovePodAndNode(t *testing.T) {
	l := lab.NewT(t)
	n1, n2 := l.Node("node1"), l.Node("node2")
	p, q, r := n1.Pod("p"), n1.Pod("q"), n2.Pod("r")
	mustServe(t, p.Sandbox, 80)
	mustServe(t, q.Sandbox, 80)
	mustServe(t, r.Sandbox, 80)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if out := ip(t, n1.Sandbox, "-o", "link"); strings.Contains(out, p.HostLink+"@") {
		t.Errorf("link of the removed pod is still there:\n%s", out)
	}
	if got := n1.Pod("p"); got.Addr4 == p.Addr4 {
		t.Errorf("address %s was used again", got.Addr4)
	}
	if _, err := r.Ask(bg, "tcp", netip.AddrPortFrom(q.Addr4, 80)); err != nil {
		t.Error(err)
	}
	if err := n2.Close(); err != nil {
		t.Fatal(err)
	}
	if err := r.Do(func() error { return nil }); !errors.Is(err, lab.ErrClosed) {
		t.Errorf("pod of a removed node: got %v, want ErrClosed", err)
	}
	if _, err := n2.AddPod("late"); !errors.Is(err, lab.ErrClosed) {
		t.Errorf("add pod to a removed node: got %v, want ErrClosed", err)
	}
}

// traces lists everything a lab could leave behind.
func traces(tb testing.TB) []string {
	tb.Helper()
	var got []string
	links, err := exec.Command("ip", "-o", "link").Output()
	if err != nil {
		tb.Fatal(err)
	}
	for line := range strings.Lines(string(links)) {
		got = append(got, "link "+strings.Fields(line)[1])
	}
	membership, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		tb.Fatal(err)
	}
	got = append(got, string(membership))
	for _, pattern := range []string{"/proc/self/task/*/ns/net", "/proc/self/fd/*"} {
		files, _ := filepath.Glob(pattern)
		for _, f := range files {
			if to, _ := os.Readlink(f); strings.HasPrefix(to, "net:") && !slices.Contains(got, to) {
				got = append(got, to)
			}
		}
	}
	cgroups, _ := filepath.Glob(filepath.Join(cgroupMount(tb), fmt.Sprintf("tandem-lab-*-%d-*", os.Getpid())))
	got = append(got, cgroups...)
	// Children are listed with the thread that forked, or adopted, them.
	lists, _ := filepath.Glob("/proc/self/task/*/children")
	for _, f := range lists {
		if pids, _ := os.ReadFile(f); len(pids) > 0 {
			got = append(got, "children "+string(pids))
		}
	}
	return got
}

func cgroupMount(tb testing.TB) string {
	tb.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		tb.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " - cgroup2 ") {
			return strings.Fields(line)[4]
		}
	}
	tb.Fatal("cgroup2 is not mounted")
	return ""
}

func TestCloseLeavesNothing(t *testing.T) {
	if err := lab.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	before := traces(t)
	l, err := lab.New(lab.Options{Pause: true})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	n := l.Node("node1")
	p := n.Pod("p")
	l.Client("outside")
	tcp, _ := mustServe(t, p.Sandbox, 80)
	if _, err := n.Ask(bg, "tcp", netip.AddrPortFrom(p.Addr4, tcp.Port)); err != nil {
		t.Error(err)
	}
	// An orphaned grandchild, in a session of its own.
	out, err := p.Command(bg, "bash", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!").Output()
	if err != nil {
		t.Fatal(err)
	}
	grandchild := strings.TrimSpace(string(out))
	if _, err := os.Stat("/proc/" + grandchild); err != nil {
		t.Fatal(err)
	}
	second, err := lab.New(lab.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	second.Node("node1").Pod("p")
	for _, l := range []*lab.Lab{l, second, l} {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := l.AddNode("late"); !errors.Is(err, lab.ErrClosed) {
		t.Errorf("add node after Close: got %v, want ErrClosed", err)
	}
	if _, err := os.Stat("/proc/" + grandchild); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the grandchild is still there: %v", err)
	}
	var after []string
	eventually(t, "threads to end", func() bool {
		after = traces(t)
		return cmp.Diff(before, after) == ""
	})
	if d := cmp.Diff(before, after); d != "" {
		t.Errorf("left behind (-before +after):\n%s", d)
	}
}

func eventually(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(5 * time.Second); !cond(); runtime.Gosched() {
		if time.Now().After(deadline) {
			tb.Errorf("timeout while waiting for %s", what)
			return
		}
	}
}

// TestSweep kills a process with an open lab: the copy of this test binary that
// runs TestSweepVictim.
func TestSweep(t *testing.T) {
	if err := lab.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	lab.NewT(t) // so that this process, which sweeps, inherits the victim's orphans
	cmd := exec.Command(os.Args[0], "-test.run=^TestSweepVictim$")
	cmd.Env = append(os.Environ(), victimEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // for the death signal
	defer runtime.UnlockOSThread()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1)
	_, readErr := out.Read(buf)
	pattern := filepath.Join(cgroupMount(t), fmt.Sprintf("tandem-*-%d-*", cmd.Process.Pid)) // with the one of Domain
	if err := lab.Sweep(); err != nil {
		t.Error(err)
	}
	alive, _ := filepath.Glob(pattern)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if readErr != nil {
		t.Fatalf("victim did not open its lab: %v", readErr)
	}
	dead, _ := filepath.Glob(pattern)
	if len(alive) != 2 || len(dead) != 2 {
		t.Errorf("cgroups after a sweep with the owner alive: %q, after its death: %q; want two each", alive, dead)
	}
	if err := lab.Sweep(); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(pattern); len(left) > 0 {
		t.Errorf("left after sweep: %q", left)
	}
}

const victimEnv = "TANDEM_LAB_TEST_VICTIM"

func TestSweepVictim(t *testing.T) {
	if os.Getenv(victimEnv) == "" {
		return // runs only as a process of TestSweep
	}
	l := lab.NewT(t, lab.Options{Pause: true})
	p := l.Node("node1").Pod("p")
	if _, err := p.Command(bg, "bash", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo").Output(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Domain("node1"); err != nil {
		t.Fatal(err)
	}
	fmt.Println("open")
	select {}
}

func BenchmarkNewLab(b *testing.B) {
	for b.Loop() {
		l := lab.NewT(b)
		for i := range 2 {
			n := l.Node(fmt.Sprintf("node%d", i+1))
			n.Pod("a")
			n.Pod("b")
		}
		l.Client("outside")
		if err := l.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDo(b *testing.B) {
	p := lab.NewT(b).Node("node1").Pod("p")
	for b.Loop() {
		if err := p.Do(func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAsk(b *testing.B) {
	l := lab.NewT(b)
	p, q := l.Node("node1").Pod("p"), l.Node("node2").Pod("q")
	mustServe(b, q.Sandbox, 80)
	for _, network := range []string{"tcp", "udp"} {
		b.Run(network, func(b *testing.B) {
			for b.Loop() {
				if _, err := p.Ask(bg, network, netip.AddrPortFrom(q.Addr4, 80)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
