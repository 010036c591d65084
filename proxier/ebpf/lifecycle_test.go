// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestSetChangesUnderLoad (I2): while a set changes under load, no connect fails, and none reaches
// a backend that is in neither the old nor the new set. After a change has returned, none reaches
// a removed backend.
func TestSetChangesUnderLoad(t *testing.T) {
	const threads, changes = 20, 10000
	l := lab.NewT(t)
	one := l.Node("node1")
	n := newNode(t, one, l, Options{})
	n.OnServiceAdd(dualService())

	// Listeners on many ports of one pod act as backends: the test is about the address that
	// connect() gets.
	pod := one.Pod("backends")
	const backends = 8
	for i := range backends {
		ln, err := listen(pod, netip.AddrPortFrom(pod.Addr4, uint16(9000+i)), byte(i))
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Shutdown(ln, unix.SHUT_RDWR)
	}
	// Generation g has backends g, g+1, g+2 (mod 8).
	set := func(g int) []int { return []int{g % backends, (g + 1) % backends, (g + 2) % backends} }
	publish := func(g int) {
		s := writertest.Slice("web-4", "web")
		s.Ports = nil
		for _, b := range set(g) {
			s := writertest.Slice(fmt.Sprintf("web-%d", b), "web", pod.Addr4.String())
			s.Ports[0].Port = ptr.To(int32(9000 + b))
			n.OnEndpointSliceUpdate(nil, s)
		}
		if g > 0 {
			gone := (g - 1) % backends
			n.OnEndpointSliceDelete(writertest.Slice(fmt.Sprintf("web-%d", gone), "web"))
		}
		n.sync(t)
	}
	publish(0)

	var current atomic.Int64 // newest generation that is completely published
	var starting atomic.Int64
	var connects atomic.Int64
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var wg sync.WaitGroup
	var failure atomic.Pointer[string]
	fail := func(format string, args ...any) {
		s := fmt.Sprintf(format, args...)
		failure.CompareAndSwap(nil, &s)
		stop()
	}
	for range threads {
		wg.Go(func() {
			for ctx.Err() == nil {
				from := current.Load()
				err := pod.Do(func() error {
					fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
					if err != nil {
						return err
					}
					defer unix.Close(fd)
					if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
						return err
					}
					if err := unix.Connect(fd, &unix.SockaddrInet4{Port: 80, Addr: vip4.As4()}); err != nil {
						return fmt.Errorf("connect: %w", err)
					}
					to := starting.Load()
					// Each backend sends its number.
					var b [1]byte
					if _, err := unix.Read(fd, b[:]); err != nil {
						return fmt.Errorf("read: %w", err)
					}
					for g := from; g <= to; g++ {
						if slices.Contains(set(int(g)), int(b[0])) {
							return nil
						}
					}
					return fmt.Errorf("reached backend %d between generations %d and %d", b[0], from, to)
				})
				if err != nil {
					fail("%v", err)
				}
				connects.Add(1)
			}
		})
	}
	for g := 1; g <= changes && ctx.Err() == nil; g++ {
		starting.Store(int64(g))
		publish(g)
		current.Store(int64(g))
	}
	stop()
	wg.Wait()
	if f := failure.Load(); f != nil {
		t.Error(*f)
	}
	t.Logf("%d connects during %d changes", connects.Load(), changes)
	if connects.Load() < changes/100 {
		t.Errorf("only %d connects: too little load", connects.Load())
	}
	writertest.Check(t, tablesOf(n.tier), n.tier.Usage())
}

// listen starts a listener that sends its number to every client.
func listen(in *lab.Pod, at netip.AddrPort, name byte) (fd int, err error) {
	err = in.Do(func() error {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}); err != nil {
			return err
		}
		return unix.Listen(fd, 4096)
	})
	if err != nil {
		return 0, err
	}
	go func() {
		for {
			c, _, err := unix.Accept(fd)
			if errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return
			}
			_, _ = unix.Write(c, []byte{name})
			unix.Close(c)
		}
	}()
	return fd, nil
}

// TestRestartUnderTraffic (I3): traffic is not disturbed by restarts, nor by upgrades of the
// programs.
func TestRestartUnderTraffic(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a, b, client := serve(t, one.Pod("a")), serve(t, one.Pod("b")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	feed := func() {
		n.OnServiceAdd(dualService())
		n.setPods(a, b)
	}
	feed()
	n.sync(t)

	var long []net.Conn
	for network, to := range targets() {
		c, err := client.Dial(t.Context(), network[:3], to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		long = append(long, c)
	}
	ctx, stop := context.WithCancel(t.Context())
	var asked, failed atomic.Int64
	var wg sync.WaitGroup
	for network, to := range targets() {
		wg.Go(func() {
			for ctx.Err() == nil {
				asked.Add(1)
				if _, err := client.Ask(t.Context(), network[:3], to); err != nil {
					failed.Add(1)
					t.Errorf("%s: %v", network, err)
					return
				}
			}
		})
	}
	changed := tablesOf(n.tier).Meta.ChangedUnixNs
	for i := range kernel.Rounds(100) {
		n.close()
		n.start(t, Options{})
		if !n.tier.Adopted() {
			t.Fatal("the maps were not adopted")
		}
		feed()
		n.sync(t)
		if tablesOf(n.tier).Meta.ChangedUnixNs != changed {
			t.Fatalf("restart %d wrote to the maps", i)
		}
		for _, c := range long {
			if _, err := lab.AskConn(t.Context(), c); err != nil {
				t.Fatalf("restart %d: %s: %v", i, c.RemoteAddr().Network(), err)
			}
		}
	}
	stop()
	wg.Wait()
	t.Logf("%d requests during 100 restarts, %d failed", asked.Load(), failed.Load())
}

// TestNewMapsUnderTraffic: when sizes grow or shrink, or the layout changes, a process moves to
// new maps without a gap for traffic.
func TestNewMapsUnderTraffic(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a, client := serve(t, one.Pod("a")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	feed := func() {
		n.OnServiceAdd(dualService())
		n.setPods(a)
		n.sync(t)
	}
	feed()
	udp, err := client.Dial(t.Context(), "udp", netip.AddrPortFrom(vip4, 80))
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	loose, err := client.ListenUDP(unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	defer loose.Close()
	exchange(t, loose, netip.AddrPortFrom(vip4, 80))

	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if _, err := client.Ask(t.Context(), "tcp", netip.AddrPortFrom(vip4, 80)); err != nil {
				t.Errorf("ask: %v", err)
				return
			}
		}
	})
	rounds := 12
	if testing.Short() {
		rounds = 4
	}
	for i := range rounds {
		if i%2 != 0 { // odd rounds change the layout, and keep the size
			tablesOf(n.tier).Meta.Layout = lbmap.LayoutVersion - 1
		}
		n.close()
		n.start(t, Options{Sizes: lbmap.Sizes{Frontends: 64 << (i / 2 % 3), Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 1 << 10, OptOuts: 16}})
		if n.tier.Adopted() {
			t.Fatal("maps of another size or layout were adopted")
		}
		feed()
		runFlowsOnce(t, n.tier)
		if peer := peerOf(t, udp); peer != netip.AddrPortFrom(vip4, 80) {
			t.Errorf("the peer of the connected socket changed to %s", peer)
		}
		if _, err := lab.AskConn(t.Context(), udp); err != nil {
			t.Fatalf("connected UDP: %v", err)
		}
		if from := exchange(t, loose, netip.AddrPortFrom(vip4, 80)); from.Addr() != vip4 {
			t.Errorf("unconnected UDP: the reply comes from %s", from)
		}
	}
	stop()
	wg.Wait()
}

// runFlowsOnce does the work of the tier's Run once.
func runFlowsOnce(t testing.TB, tier *Tier) {
	t.Helper()
	if _, err := tier.sockets.CloseNow(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestModelKernel is TestModel with the kernel's maps.
func TestModelKernel(t *testing.T) {
	l := lab.NewT(t)
	at := l.Node("node1")
	n := newNode(t, at, l, Options{})
	for seed := range uint64(kernel.Rounds(20)) {
		c := writertest.NewCluster(seed)
		for step := range 30 {
			for range 1 + c.Rand.IntN(6) {
				c.Event(n)
			}
			if c.Rand.IntN(8) == 0 {
				n.close()
				n.start(t, Options{})
				for _, s := range c.Services {
					n.OnServiceAdd(s)
				}
				for _, s := range c.Slices {
					n.OnEndpointSliceAdd(s)
				}
			}
			n.sync(t)
			if got, want := writertest.Text(tablesOf(n.tier)), writertest.Wanted(c.Decisions()); got != want {
				t.Fatalf("seed %d step %d:\ngot\n%s\nwant\n%s", seed, step, got, want)
			}
			writertest.Check(t, tablesOf(n.tier), n.tier.Usage())
		}
		for _, s := range c.Services {
			n.OnServiceDelete(s)
		}
		for _, s := range c.Slices {
			n.OnEndpointSliceDelete(s)
		}
	}
}

// TestRefusedBatch: if the kernel refuses a batch, Update reports that nothing was written.
func TestRefusedBatch(t *testing.T) {
	l := lab.NewT(t)
	n := newNode(t, l.Node("node1"), l, Options{})
	m, err := lbmap.Reopen(n.tier.maps["tdm_frontend"], unix.BPF_F_RDONLY)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	wrote, err := (lbmap.NewFrontendMap(m)).Update(make([]lbmap.FrontendKey, 3), make([]lbmap.FrontendValue, 3))
	if wrote != 0 || !errors.Is(err, fs.ErrPermission) {
		t.Errorf("wrote %d, %v", wrote, err)
	}
}

// TestReattaches: a full sync attaches programs again that others detached.
func TestReattaches(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a := serve(t, one.Pod("a"))
	n := newNode(t, one, l, Options{Signals: true})
	n.OnServiceAdd(dualService())
	n.setPods(a)
	n.sync(t)
	if err := cleanupOn(one); !errors.Is(err, datapath.ErrBusy) {
		t.Errorf("cleanup while a process runs: %v", err)
	}
	if removed, err := removal.Programs(n.tier.cgroup, func() ([]string, error) { return nil, nil }); err != nil || len(removed) != datapath.GuardHook {
		t.Fatalf("%v %v", removed, err)
	}
	if err := n.tier.Sync(t.Context(), proxier.Update{Full: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := one.Ask(t.Context(), "tcp", netip.AddrPortFrom(vip4, 80)); err != nil {
		t.Error(err)
	}
}

// TestPolicyChangesUnderLoad: a Service whose traffic policy changes between Cluster and Local,
// which have different sets, is served without a gap.
func TestPolicyChangesUnderLoad(t *testing.T) {
	l := lab.NewT(t)
	one, two := l.Node("node1"), l.Node("node2")
	a, b, client := serve(t, one.Pod("a")), serve(t, two.Pod("b")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	local := dualService(func(s *v1.Service) {
		s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
	})
	n.OnServiceAdd(dualService())
	n.setPods(a, b)
	n.sync(t)
	ctx, stop := context.WithCancel(t.Context())
	var asked atomic.Int64
	var wg sync.WaitGroup
	for network, to := range targets() {
		wg.Go(func() {
			for ctx.Err() == nil {
				if _, err := client.Ask(t.Context(), network[:3], to); err != nil {
					t.Errorf("%s: %v", network, err)
					return
				}
				asked.Add(1)
			}
		})
	}
	for i := 0; i < 2000 || asked.Load() < 200; i++ {
		if i%2 == 0 {
			n.OnServiceUpdate(nil, local)
		} else {
			n.OnServiceUpdate(nil, dualService())
		}
		n.sync(t)
		if t.Failed() {
			break
		}
	}
	stop()
	wg.Wait()
	t.Logf("%d requests", asked.Load())
	writertest.Check(t, tablesOf(n.tier), n.tier.Usage())
}
