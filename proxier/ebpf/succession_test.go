// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
	"github.com/tandem-proxy/tandem/test/lab"
)

// listensEnv has a copy of the test program listen on these addresses, each behind its network.
const listensEnv = "TANDEM_TEST_LISTENS"

// listenIfAsked does not return if this process is such a copy.
func listenIfAsked() {
	list := strings.Fields(os.Getenv(listensEnv))
	if len(list) == 0 {
		return
	}
	for i := 0; i < len(list); i += 2 {
		var err error
		if list[i] == "udp" {
			_, err = net.ListenPacket(list[i], list[i+1])
		} else {
			_, err = net.Listen(list[i], list[i+1])
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin) // until it is killed
	os.Exit(0)
}

// listener starts a process of that name, and returns when it listens. It ends with the test.
func listener(t *testing.T, in *lab.Sandbox, name string, addresses ...string) *lab.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.Symlink(self, path); err != nil {
		t.Fatal(err)
	}
	c := in.Command(context.Background(), path)
	c.Env = append(os.Environ(), listensEnv+"="+strings.Join(addresses, " "))
	c.Stderr = os.Stderr
	if _, err := c.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%s says %q: %v", name, line, err)
	}
	return c
}

// both are the default ports, where upstream's kube-proxy listens by default.
var (
	ports  = successor.Ports{Health: 10256, Metrics: 10249}
	health = []string{"tcp", "0.0.0.0:10256"}
	metric = []string{"tcp", "127.0.0.1:10249"}
	both   = append(append([]string{}, health...), metric...)
)

// succession is an edge whose owner is gone.
type succession struct {
	*edge
	value *lbmap.Successor
}

const testGrace = 300 * time.Millisecond

func newSuccession(t *testing.T) *succession {
	t.Helper()
	s := &succession{edge: newEdge(t, Options{Ports: ports, YieldGrace: testGrace})}
	serve(t, s.here)
	s.setPods(s.here)
	s.sync(t)
	values, memory, err := lbmap.Memory[lbmap.Successor](s.tier.maps[successor.MapName])
	if err != nil {
		t.Fatal(err)
	}
	s.value = &values[0]
	_ = memory // of the test process
	return s
}

// reset makes it the state after the death of an owner with these ports.
func (s *succession) reset(p successor.Ports, grace time.Duration) {
	*s.value = lbmap.Successor{}
	s.tier.successor.Own(1, p, grace)
	atomic.StoreUint64(&s.value.OwnerSeenNs, 0)
}

// try connects from this host and from outside.
func (s *succession) try(ctx context.Context) error {
	_, host := s.at.Ask(ctx, "tcp", netip.AddrPortFrom(vip4, 80))
	_, outside := s.client.Ask(ctx, "udp", netip.AddrPortFrom(lb6, lbPort))
	return errors.Join(host, outside)
}

// awaited says that the programs expect a successor.
func (s *succession) awaited() bool { return atomic.LoadUint64(&s.value.DeadlineNs) != 0 }

// yields waits until nothing is served any more.
func (s *succession) yields(t *testing.T) {
	t.Helper()
	lab.Await(t, 10*time.Second, "programs yield", func() error {
		if err := s.try(shortly(t)); err == nil {
			return errors.New("connections are served")
		}
		if _, yielded := s.tier.successor.Yielded(); !yielded {
			return errors.New("the map does not say so")
		}
		return nil
	})
}

// serves waits until sockets and packets have looked for the successor, if it is awaited, and
// checks that connections are served.
func (s *succession) serves(t *testing.T) {
	t.Helper()
	for _, who := range []int{lbmap.SeekBySocket, lbmap.SeekByPacket} {
		lab.Await(t, 10*time.Second, "programs look", func() error {
			if err := s.try(t.Context()); err != nil {
				t.Errorf("not served: %v", err)
				return nil
			}
			if s.awaited() && atomic.LoadUint64(&s.value.SoughtNs[who]) < atomic.LoadUint64(&s.value.DeadlineNs) {
				return errors.New("they did not")
			}
			return nil
		})
	}
	if y, yielded := s.tier.successor.Yielded(); yielded {
		t.Errorf("yielded to %+v", y)
	}
}

// TestSuccessor: programs without a process leave new connections to another kube-proxy, and
// to nothing else that may use its ports.
func TestSuccessor(t *testing.T) {
	s := newSuccession(t)
	node := func(t *testing.T, addresses ...string) { listener(t, s.at.Sandbox, "other", addresses...) }
	for _, tt := range []struct {
		name    string
		ports   successor.Ports
		never   bool // a grace of 0
		play    func(*testing.T)
		awaited bool // for a moment
		yields  bool
	}{
		{name: "another kube-proxy", ports: ports, play: func(t *testing.T) { node(t, both...) }, yields: true},
		{name: "metrics first", ports: ports, play: func(t *testing.T) { node(t, append(append([]string{}, metric...), health...)...) }, yields: true},
		{name: "IPv6", ports: ports, play: func(t *testing.T) { node(t, "tcp6", "[::]:10256", "tcp6", "[::1]:10249") }, yields: true},
		{name: "dual stack", ports: ports, play: func(t *testing.T) { node(t, "tcp", ":10256", "tcp", "localhost:10249") }, yields: true},
		{name: "the node's addresses", ports: ports, play: func(t *testing.T) {
			node(t, "tcp", netip.AddrPortFrom(s.at.Addr4, 10256).String(), "tcp", netip.AddrPortFrom(s.at.Addr6, 10249).String())
		}, yields: true},
		{name: "other ports", ports: successor.Ports{Health: 20256, Metrics: 20249}, play: func(t *testing.T) { node(t, both...) }},
		{name: "health alone", ports: ports, play: func(t *testing.T) { node(t, health...) }},
		{name: "metrics alone", ports: ports, play: func(t *testing.T) { node(t, metric...) }},
		{name: "health alone, of that name", ports: ports, play: func(t *testing.T) { listener(t, s.at.Sandbox, "kube-proxy", health...) }},
		{name: "two processes", ports: ports, play: func(t *testing.T) { node(t, health...); node(t, metric...) }},
		{name: "another one after it", ports: ports, play: func(t *testing.T) {
			first := listener(t, s.at.Sandbox, "other", both...)
			_ = first.Close()
			node(t, health...)
		}},
		{name: "UDP", ports: ports, play: func(t *testing.T) { node(t, "udp", "0.0.0.0:10256", "udp", "127.0.0.1:10249") }},
		{name: "in a pod", ports: ports, play: func(t *testing.T) { listener(t, s.here.Sandbox, "kube-proxy", both...) }},
		{name: "one port and the name", ports: successor.Ports{Metrics: 10249}, play: func(t *testing.T) { listener(t, s.at.Sandbox, "kube-proxy", both...) }, yields: true},
		{name: "one port and no name", ports: successor.Ports{Metrics: 10249}, play: func(t *testing.T) { node(t, both...) }},
		{name: "one port and a longer name", ports: successor.Ports{Metrics: 10249}, play: func(t *testing.T) { listener(t, s.at.Sandbox, "kube-proxy-x", both...) }},
		{name: "never", ports: ports, never: true, play: func(t *testing.T) { node(t, both...) }},
		{name: "it ends", ports: ports, play: func(t *testing.T) { _ = listener(t, s.at.Sandbox, "other", both...).Close() }, awaited: true},
		{name: "it ends, and another takes one port", ports: ports, play: func(t *testing.T) {
			_ = listener(t, s.at.Sandbox, "other", both...).Close()
			node(t, metric...)
		}},
		{name: "crash loop", ports: ports, play: func(t *testing.T) {
			for range 5 {
				_ = listener(t, s.at.Sandbox, "other", both...).Close()
			}
		}, awaited: true},
		{name: "this process", ports: ports, play: func(t *testing.T) {
			s.tier.successor.Claim(selfNumber(t))
			s.hold(t, both...)
			atomic.StoreUint64(&s.value.OwnerSeenNs, 0) // it hangs from now on
		}},
		{name: "an earlier process of that number", ports: ports, play: func(t *testing.T) {
			s.tier.successor.Claim(selfNumber(t))
			atomic.StoreUint64(&s.value.OwnerSeenNs, 0)
			s.hold(t, both...)
		}, yields: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			grace := testGrace
			if tt.never {
				grace = 0
			}
			s.reset(tt.ports, grace)
			tt.play(t)
			if tt.yields {
				s.yields(t)
				return
			}
			if !tt.awaited && !tt.never && s.awaited() {
				t.Error("this counts as another kube-proxy")
			}
			if tt.never {
				atomic.StoreUint64(&s.value.DeadlineNs, 1)
				if err := s.try(t.Context()); err != nil {
					t.Error(err)
				}
				return
			}
			s.serves(t)
		})
	}
}

// TestAwaitOther: the owner tells the programs of another kube-proxy that held its ports before they were attached.
func TestAwaitOther(t *testing.T) {
	s := newSuccession(t)
	at := func(list ...string) (all []netip.AddrPort) {
		for i := 1; i < len(list); i += 2 {
			all = append(all, netip.MustParseAddrPort(list[i]))
		}
		return all
	}
	dual := []string{"tcp", "[::]:10256", "tcp", "[::1]:10249"}
	for _, tt := range []struct {
		name   string
		listen []string
		tell   []netip.AddrPort
		ends   bool
		yields bool
	}{
		{name: "it is not told", listen: both},
		{name: "told", listen: both, tell: at(both...), yields: true},
		{name: "dual stack", listen: dual, tell: at(dual...), yields: true},
		{name: "one port", listen: both, tell: at(health...)},
		{name: "another address", listen: both, tell: at("tcp", "0.0.0.0:10256", "tcp", "127.0.0.2:10249")},
		{name: "gone since", listen: both, tell: at(both...), ends: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			other := listener(t, s.at.Sandbox, "other", tt.listen...)
			s.reset(ports, testGrace) // the programs have seen nothing
			s.tier.AwaitOther(tt.tell)
			if tt.ends {
				_ = other.Close()
			}
			if tt.yields {
				s.yields(t)
				return
			}
			s.serves(t)
		})
	}
}

// hold listens in this process until the end of the test.
func (s *succession) hold(t *testing.T, addresses ...string) {
	t.Helper()
	for i := 0; i < len(addresses); i += 2 {
		var l net.Listener
		if err := s.at.Do(func() (err error) { l, err = net.Listen(addresses[i], addresses[i+1]); return err }); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	}
}

func selfNumber(t *testing.T) uint32 {
	t.Helper()
	self, err := successor.Self()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

// TestOwnerAlive: while a process of this project is alive nothing is yielded, though another
// kube-proxy holds the ports. It is when that process is gone.
func TestOwnerAlive(t *testing.T) {
	const grace = 2 * time.Second // for a busy machine
	s := newSuccession(t)
	s.reset(ports, grace)
	listener(t, s.at.Sandbox, "other", both...)
	if !s.awaited() {
		t.Error("the other kube-proxy went unnoticed")
	}
	end := time.Now().Add(2 * grace)
	lab.Await(t, 10*grace, "an owner that is alive for longer than the grace", func() error {
		s.tier.successor.Beat()
		if err := s.try(t.Context()); err != nil {
			t.Error(err)
			return nil
		}
		if left := time.Until(end); left > 0 {
			return fmt.Errorf("%v to go", left)
		}
		return nil
	})
	s.yields(t)
}

// TestClaim: a process of any mode is alive for the programs, without being their owner.
func TestClaim(t *testing.T) {
	s := newSuccession(t)
	s.reset(ports, testGrace)
	ctx, cancel := context.WithCancel(t.Context())
	claim, err := successor.NewClaim(ctx, s.at.CgroupPath())
	if err != nil || len(claim.Maps) != 1 {
		t.Fatalf("claims %v: %v", claim, err)
	}
	if s.value.OwnerTgid != selfNumber(t) || s.value.Holders[lbmap.PortHealth].Port != ports.Health || s.value.GraceNs != uint64(testGrace) {
		t.Errorf("it says %+v", s.value)
	}
	done := make(chan struct{})
	go func() { defer close(done); claim.Run(ctx) }()
	beats := map[uint64]bool{}
	lab.Await(t, 20*time.Second, "signs of life", func() error {
		beats[atomic.LoadUint64(&s.value.OwnerSeenNs)] = true
		if len(beats) < 3 {
			return fmt.Errorf("%d of them", len(beats))
		}
		return nil
	})
	cancel()
	<-done
	bare := s.lab.Node("bare")
	if claim, err := successor.NewClaim(t.Context(), bare.CgroupPath()); err != nil || len(claim.Maps) > 0 {
		t.Errorf("without programs it claims %v: %v", claim, err)
	}
}

// TestTakeBack: the next process serves again, once its maps hold everything. Established
// connections continue all the while.
func TestTakeBack(t *testing.T) {
	s := newSuccession(t)
	s.reset(ports, testGrace)
	var long []net.Conn
	ask := func(want error) {
		t.Helper()
		for _, c := range long {
			if _, err := lab.AskConn(t.Context(), c); !errors.Is(err, want) {
				t.Errorf("an established connection to %s: %v", c.RemoteAddr(), err)
			}
		}
	}
	for _, network := range []string{"tcp", "udp"} {
		for from, to := range map[*lab.Sandbox]netip.AddrPort{s.at.Sandbox: netip.AddrPortFrom(vip6, 80), s.client.Sandbox: netip.AddrPortFrom(lb4, lbPort)} {
			c, err := from.Dial(t.Context(), network, to)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			long = append(long, c)
		}
	}
	ask(nil)
	other := listener(t, s.at.Sandbox, "other", both...)
	s.yields(t)
	ask(nil)
	if y := statusOf(t, inspectNode(t, s.at)).YieldedTo; y == nil || y.Process != "other" || time.Since(y.Since) > time.Minute {
		t.Errorf("status: yielded to %+v", y)
	}
	_ = other.Close()
	if err := s.try(shortly(t)); err == nil {
		t.Error("connections are served when the other kube-proxy restarts")
	}

	s.close()
	s.begin(t, Options{Ports: ports, YieldGrace: testGrace}, nil)
	s.setPods(s.here)
	if !s.tier.Adopted() || s.tier.LastYield().IsZero() {
		t.Errorf("adopted %v, last yield %v", s.tier.Adopted(), s.tier.LastYield())
	}
	if err := s.try(shortly(t)); err == nil {
		t.Error("connections are served before the first sync")
	}
	s.sync(t)
	if err := s.try(t.Context()); err != nil {
		t.Errorf("after the first sync: %v", err)
	}
	ask(nil)
	if y := statusOf(t, inspectNode(t, s.at)).YieldedTo; y != nil {
		t.Errorf("status: yielded to %+v", y)
	}
}
