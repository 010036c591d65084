// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/sockdiag"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// Address plan: every test has its own network namespace, and uses only loopback. Backends have the
// addresses 127.0.1.1 and ::1, with a port for each kind of socket.
var (
	backend4 = netip.MustParseAddr("127.0.1.1")
	backend6 = netip.MustParseAddr("::1")
	mapped   = netip.AddrFrom16(backend4.As16())
)

var bg = context.Background()

func netns(tb testing.TB) *lab.Sandbox {
	tb.Helper()
	return lab.NewT(tb, lab.Options{Pause: true}).Node("sockets").Sandbox
}

// connect opens n sockets. They are closed at the end of the test.
func connect(tb testing.TB, s *lab.Sandbox, network string, to netip.AddrPort, n int) []net.Conn {
	tb.Helper()
	conns := make([]net.Conn, n)
	for i := range conns {
		c, err := s.Dial(bg, network, to)
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { _ = c.Close() })
		conns[i] = c
	}
	return conns
}

func dump(s *lab.Sandbox, f sockdiag.Filter, fn func(sockdiag.Socket) bool) (seen, destroyed int, err error) {
	err = s.Do(func() error {
		seen, destroyed, err = sockdiag.Dump(bg, f, fn)
		return err
	})
	return seen, destroyed, err
}

func all(sockdiag.Socket) bool  { return true }
func none(sockdiag.Socket) bool { return false }

// pending returns the pending error of a socket, or nil.
func pending(tb testing.TB, c net.Conn) error {
	tb.Helper()
	rc, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		tb.Fatal(err)
	}
	var code int
	if err := rc.Control(func(fd uintptr) {
		code, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
	}); err != nil {
		tb.Fatal(err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	if code == 0 {
		return nil
	}
	return unix.Errno(code)
}

func TestFindAndDestroyUDP(t *testing.T) {
	const many, few = 330, 10
	for _, tc := range []struct {
		name   string
		remote netip.Addr
		family uint8
	}{
		{"v4", backend4, unix.AF_INET},
		{"v6", backend6, unix.AF_INET6},
		{"v4-mapped", mapped, unix.AF_INET6},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := netns(t)
			var rest []net.Conn
			for _, a := range []netip.Addr{backend4, backend6, mapped} {
				rest = append(rest, connect(t, s, "udp", netip.AddrPortFrom(a, 1053), many)...)
			}
			gone := netip.AddrPortFrom(tc.remote, 2053)
			victims := connect(t, s, "udp", gone, few)
			unconnected, err := s.ListenUDP(unix.AF_INET6)
			if err != nil {
				t.Fatal(err)
			}
			defer unconnected.Close()

			f := sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: []netip.AddrPort{gone}}
			seen, destroyed, err := dump(s, f, func(got sockdiag.Socket) bool {
				if got.Family != tc.family || got.State != sockdiag.Established || got.Cookie == 0 || got.Inode == 0 ||
					got.Remote != netip.AddrPortFrom(tc.remote.Unmap(), 2053) || got.Local.Port() == 0 || got.Storage != nil {
					t.Errorf("got %+v", got)
				}
				return true
			})
			if err != nil || seen != few || destroyed != few {
				t.Errorf("got %d seen, %d destroyed, %v; want %d of each", seen, destroyed, err, few)
			}
			for _, c := range victims {
				// A client that has not written yet sees this one first.
				if _, err := c.Write([]byte("?")); !errors.Is(err, unix.EDESTADDRREQ) {
					t.Fatalf("write to a destroyed socket: got %v, want EDESTADDRREQ", err)
				}
				if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) {
					t.Fatalf("read from a destroyed socket: got %v, want ECONNABORTED", err)
				}
			}
			for _, c := range rest {
				if err := pending(t, c); err != nil {
					t.Fatalf("other socket %s: %v", c.RemoteAddr(), err)
				}
			}
			f.Remote = nil
			if seen, _, err := dump(s, f, none); err != nil || seen != 3*many {
				t.Errorf("all connected: got %d, %v; want %d", seen, err, 3*many)
			}
		})
	}
}

func TestTCP(t *testing.T) {
	s := netns(t)
	srv, err := s.ServeTCP(80)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.Addr{backend4, backend6, mapped} {
		to := netip.AddrPortFrom(a, srv.Port)
		keep := connect(t, s, "tcp", netip.AddrPortFrom(a, srv.Port), 1)[0]
		victim := connect(t, s, "tcp", to, 1)[0]
		local := victim.LocalAddr().(*net.TCPAddr).AddrPort().Port()
		f := sockdiag.Filter{Protocol: unix.IPPROTO_TCP, Remote: []netip.AddrPort{to}}
		_, destroyed, err := dump(s, f, func(got sockdiag.Socket) bool { return got.Local.Port() == local })
		if err != nil || destroyed != 1 {
			t.Errorf("%s: got %d destroyed, %v; want 1", a, destroyed, err)
		}
		if _, err := lab.AskConn(bg, victim); !errors.Is(err, unix.ECONNABORTED) {
			t.Errorf("%s: use of a destroyed connection: got %v, want ECONNABORTED", a, err)
		}
		if _, err := lab.AskConn(bg, keep); err != nil {
			t.Errorf("%s: other connection: %v", a, err)
		}
	}
	listening := sockdiag.Filter{Protocol: unix.IPPROTO_TCP, States: 1 << sockdiag.Listen}
	if seen, _, err := dump(s, listening, none); err != nil || seen != 1 {
		t.Errorf("listening sockets: got %d, %v; want 1", seen, err)
	}
}

// TestManyRemotes: lists of any length find the same sockets, whether the kernel or user space
// filters.
func TestManyRemotes(t *testing.T) {
	s := netns(t)
	var remotes []netip.AddrPort
	for i := range 300 {
		remotes = append(remotes, netip.AddrPortFrom(backend4, uint16(3000+i)))
	}
	for _, r := range remotes {
		connect(t, s, "udp", r, 1)
		connect(t, s, "udp", netip.AddrPortFrom(mapped, r.Port()), 1)
	}
	for _, n := range []int{1, 2, 127, 128, 129, 300} {
		f := sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: remotes[:n]}
		if seen, _, err := dump(s, f, none); err != nil || seen != 2*n {
			t.Errorf("%d addresses: got %d sockets, %v; want %d", n, seen, err, 2*n)
		}
	}
	f := sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: []netip.AddrPort{netip.AddrPortFrom(backend4, 0)}}
	if seen, _, err := dump(s, f, none); err != nil || seen != 600 {
		t.Errorf("any port: got %d sockets, %v; want 600", seen, err)
	}
}

func newStorage(tb testing.TB) *ciliumebpf.Map {
	tb.Helper()
	// The kernel requires BTF for key (int) and value.
	u32 := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	u64 := &btf.Int{Name: "unsigned long long", Size: 8}
	m, err := ciliumebpf.NewMap(&ciliumebpf.MapSpec{
		Name: "sk_store", Type: ciliumebpf.SkStorage, KeySize: 4, ValueSize: 8, Flags: unix.BPF_F_NO_PREALLOC,
		Key: u32, Value: u64,
	})
	if err != nil {
		lab.SkipOrFail(tb, fmt.Errorf("socket storage map: %w", err))
	}
	tb.Cleanup(func() { m.Close() })
	return m
}

func mark(tb testing.TB, m *ciliumebpf.Map, c net.Conn, value uint64) {
	tb.Helper()
	rc, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		tb.Fatal(err)
	}
	cerr := rc.Control(func(fd uintptr) { err = m.Put(int32(fd), value) })
	if err := errors.Join(cerr, err); err != nil {
		tb.Fatalf("set storage: %v", err)
	}
}

// bothWays runs a test with the iterator over the map, where the kernel permits it, and with those over sockets.
func bothWays(t *testing.T, test func(t *testing.T, o sockdiag.StorageOptions)) {
	t.Run("map", func(t *testing.T) { test(t, sockdiag.StorageOptions{}) })
	t.Run("sockets", func(t *testing.T) { test(t, sockdiag.StorageOptions{PerNetNS: true}) })
}

func mustReader(tb testing.TB, m *ciliumebpf.Map, o sockdiag.StorageOptions) *sockdiag.StorageReader {
	tb.Helper()
	r, err := sockdiag.NewStorageReader(m, o)
	if errors.Is(err, sockdiag.ErrStorageNotSupported) {
		kernel.Since(tb, 5, 12, "reading socket storage")
		lab.SkipOrFail(tb, err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := r.Close(); err != nil {
			tb.Error(err)
		}
	})
	return r
}

// TestStorageTellsWhoIsWho: socket storage distinguishes sockets that were connected through a
// Service, which may be destroyed, from others.
func TestStorageTellsWhoIsWho(t *testing.T) { bothWays(t, testStorageTellsWhoIsWho) }

func testStorageTellsWhoIsWho(t *testing.T, o sockdiag.StorageOptions) {
	for _, network := range []string{"udp", "tcp"} {
		for _, a := range []netip.Addr{backend4, backend6, mapped} {
			t.Run(network+" "+a.String(), func(t *testing.T) {
				s := netns(t)
				m := newStorage(t)
				r := mustReader(t, m, o)
				if _, err := s.ServeTCP(1053); err != nil {
					t.Fatal(err)
				}
				const each = 20
				to := netip.AddrPortFrom(a, 1053)
				direct, service := connect(t, s, network, to, each), connect(t, s, network, to, each)
				for i, c := range service {
					mark(t, m, c, uint64(i))
				}
				values, err := r.Read(bg)
				if err != nil || len(values) != each {
					t.Fatalf("read %d values, %v; want %d", len(values), err, each)
				}
				for cookie, v := range values {
					if v.Cookie != cookie || v.State != sockdiag.Established || v.Remote != netip.AddrPortFrom(a.Unmap(), 1053) || v.Local.Port() == 0 || !v.Local.Addr().IsLoopback() {
						t.Fatalf("cookie %d has %+v", cookie, v)
					}
				}
				f := sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: []netip.AddrPort{to}, Storage: values, Info: true}
				if network == "tcp" {
					f.Protocol = unix.IPPROTO_TCP
				}
				found := map[uint64]bool{}
				seen, destroyed, err := dump(s, f, func(got sockdiag.Socket) bool {
					if (got.TCP != nil && got.TCP.Rtt > 0) != (network == "tcp") {
						t.Errorf("state of TCP: %+v", got.TCP)
					}
					if read := values[got.Cookie]; got.Storage != nil && (read.Local != got.Local || read.Remote != got.Remote || read.Family != got.Family) {
						t.Errorf("read %+v, found %+v", read, got)
					}
					if got.Storage != nil {
						found[binary.NativeEndian.Uint64(got.Storage)] = true
					}
					return got.Storage != nil
				})
				if err != nil || seen != 2*each || destroyed != each || len(found) != each || !found[each-1] {
					t.Errorf("got %d seen, %d destroyed, values %v, %v; want %d, %d and 0 to %d",
						seen, destroyed, found, err, 2*each, each, each-1)
				}
				for _, c := range service {
					if err := pending(t, c); !errors.Is(err, unix.ECONNABORTED) {
						t.Fatalf("marked socket: got %v, want ECONNABORTED", err)
					}
				}
				for _, c := range direct {
					if err := pending(t, c); err != nil {
						t.Fatalf("unmarked socket: %v", err)
					}
				}
			})
		}
	}
}

// TestStorageOfAllNamespaces: one Read returns the values of all namespaces, even if they exceed
// the kernel's buffer.
func TestStorageOfAllNamespaces(t *testing.T) { bothWays(t, testStorageOfAllNamespaces) }

func testStorageOfAllNamespaces(t *testing.T, o sockdiag.StorageOptions) {
	l := lab.NewT(t, lab.Options{Pause: true})
	m := newStorage(t)
	r := mustReader(t, m, o)
	for i := range 2 {
		s := l.Node(fmt.Sprintf("node%d", i+1)).Sandbox
		for _, c := range connect(t, s, "udp", netip.AddrPortFrom(backend4, 1053), 3000) {
			mark(t, m, c, uint64(i))
		}
	}
	values, err := r.Read(bg)
	if err != nil {
		t.Fatal(err)
	}
	count := map[uint64]int{}
	for _, v := range values {
		count[binary.NativeEndian.Uint64(v.Storage)]++
	}
	if len(count) != 2 || count[0] != 3000 || count[1] != 3000 {
		t.Errorf("values: got %v, want 3000 of 0 and 1 each", count)
	}
}

func TestErrors(t *testing.T) {
	s := netns(t)
	connect(t, s, "udp", netip.AddrPortFrom(backend4, 1053), 1)
	array, err := ciliumebpf.NewMap(&ciliumebpf.MapSpec{Type: ciliumebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer array.Close()
	if _, err := sockdiag.NewStorageReader(array, sockdiag.StorageOptions{}); err == nil || errors.Is(err, sockdiag.ErrStorageNotSupported) {
		t.Errorf("map of another type: got %v", err)
	}
	if _, _, err := dump(s, sockdiag.Filter{Protocol: unix.IPPROTO_ICMP}, none); err == nil {
		t.Error("Dump accepted ICMP")
	}
	ctx, cancel := context.WithCancel(bg)
	cancel()
	err = s.Do(func() error {
		_, _, err := sockdiag.Dump(ctx, sockdiag.Filter{Protocol: unix.IPPROTO_UDP}, all)
		return err
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: got %v", err)
	}
}

// TestClosedMeanwhile: a socket that is closed between dump and destroy is no error, and a new
// socket with the same addresses is not destroyed.
func TestClosedMeanwhile(t *testing.T) {
	s := netns(t)
	to := netip.AddrPortFrom(backend4, 1053)
	old := connect(t, s, "udp", to, 1)[0]
	local := old.LocalAddr().(*net.UDPAddr).AddrPort()
	var heir int
	err := s.Do(func() error {
		_, destroyed, err := sockdiag.Dump(bg, sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: []netip.AddrPort{to}}, func(sockdiag.Socket) bool {
			_ = old.Close()
			heir, _ = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err := unix.Bind(heir, &unix.SockaddrInet4{Port: int(local.Port()), Addr: local.Addr().As4()}); err != nil {
				t.Errorf("take over the port: %v", err)
			}
			if err := unix.Connect(heir, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}); err != nil {
				t.Errorf("connect again: %v", err)
			}
			return true
		})
		if destroyed != 0 {
			t.Errorf("destroyed %d sockets", destroyed)
		}
		return err
	})
	defer unix.Close(heir)
	if err != nil {
		t.Error(err)
	}
	if code, err := unix.GetsockoptInt(heir, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
		t.Errorf("new socket: error %v, %v", unix.Errno(code), err)
	}
}

func TestForEachNetNS(t *testing.T) {
	l := lab.NewT(t, lab.Options{Pause: true})
	n := l.Node("node1")
	a, b := n.Pod("a"), n.Pod("b")
	byName := l.Client("by-name") // has no process: found by its mount only
	mount := filepath.Join(t.TempDir(), "net ns")
	if err := os.WriteFile(mount, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(byName.NetNSPath(), mount, "", unix.MS_BIND, ""); err != nil {
		t.Fatalf("mount namespace: %v", err)
	}
	defer func() {
		if err := unix.Unmount(mount, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()

	want := map[uint64]string{}
	for _, s := range []*lab.Sandbox{n.Sandbox, a.Sandbox, b.Sandbox, byName.Sandbox} {
		ino, err := s.NetNSInode()
		if err != nil {
			t.Fatal(err)
		}
		want[ino] = s.Name
	}
	own := ownNetNS(t)
	sentinel := errors.New("this one fails")
	count := map[uint64]int{}
	err := sockdiag.ForEachNetNS(bg, "/proc", func(ns sockdiag.NetNS) error {
		count[ns.Inode]++
		if here := ownNetNS(t); here != fmt.Sprintf("net:[%d]", ns.Inode) {
			t.Errorf("%s: fn runs in %s", ns.Path, here)
		}
		if want[ns.Inode] == "a" {
			return sentinel
		}
		return nil
	})
	// Processes that do not belong to the test may be inaccessible.
	if !errors.Is(err, sentinel) || strings.Count(err.Error(), "\n") > 1 ||
		strings.Count(err.Error(), "\n") == 1 && !errors.Is(err, fs.ErrPermission) {
		t.Errorf("error: got %v, want only the error of fn", err)
	}
	for ino, name := range want {
		if count[ino] == 0 {
			t.Errorf("%s was not visited", name)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &st); err != nil || count[st.Ino] == 0 {
		t.Errorf("own namespace was not visited (%v)", err)
	}
	for ino, n := range count {
		if n != 1 {
			t.Errorf("namespace %d was visited %d times", ino, n)
		}
	}
	if now := ownNetNS(t); now != own {
		t.Errorf("the caller is in %s afterwards, was in %s", now, own)
	}
}

func ownNetNS(tb testing.TB) string {
	s, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		tb.Error(err)
	}
	return s
}

func TestForEachNetNSHasNoProc(t *testing.T) {
	if err := sockdiag.ForEachNetNS(bg, t.TempDir()+"/none", func(sockdiag.NetNS) error { return nil }); err == nil {
		t.Error("no error")
	}
}

func TestForEachNetNSCallbackEnds(t *testing.T) {
	if err := lab.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	if err := sockdiag.ForEachNetNS(bg, "/proc", func(sockdiag.NetNS) error { runtime.Goexit(); return nil }); err == nil || !strings.Contains(err.Error(), "Goexit") {
		t.Error("Goexit was not reported")
	}
	defer func() {
		if r := recover(); r != "x" {
			t.Errorf("recovered %v, want the callback's panic", r)
		}
	}()
	_ = sockdiag.ForEachNetNS(bg, "/proc", func(sockdiag.NetNS) error { panic("x") })
}

func BenchmarkFindAndDestroy(b *testing.B) {
	const others, few = 10000, 10
	s := netns(b)
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil || lim.Cur < others+100 {
		lab.SkipOrFail(b, fmt.Errorf("%d file descriptors (limit %d, %w)", others, lim.Cur, err))
	}
	connect(b, s, "udp", netip.AddrPortFrom(backend4, 1053), others)
	gone := netip.AddrPortFrom(backend4, 2053)
	f := sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: []netip.AddrPort{gone}}
	for _, n := range []int{few, 0} {
		b.Run(fmt.Sprintf("sockets=%d/gone=%d", others, n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				conns := make([]net.Conn, n)
				for i := range conns {
					c, err := s.Dial(bg, "udp", gone)
					if err != nil {
						b.Fatal(err)
					}
					conns[i] = c
				}
				b.StartTimer()
				if _, destroyed, err := dump(s, f, all); err != nil || destroyed != n {
					b.Fatalf("destroyed %d, %v", destroyed, err)
				}
				b.StopTimer()
				for _, c := range conns {
					_ = c.Close()
				}
				b.StartTimer()
			}
		})
	}
	b.Run(fmt.Sprintf("sockets=%d/unfiltered", others), func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if seen, _, err := dump(s, sockdiag.Filter{Protocol: unix.IPPROTO_UDP}, none); err != nil || seen < others {
				b.Fatalf("seen %d, %v", seen, err)
			}
		}
	})
}

func BenchmarkReadStorage(b *testing.B) {
	const marked = 10000
	s := netns(b)
	m := newStorage(b)
	for _, c := range connect(b, s, "udp", netip.AddrPortFrom(backend4, 1053), marked) {
		mark(b, m, c, 1)
	}
	for name, perNetNS := range map[string]bool{"map": false, "sockets": true} {
		r := mustReader(b, m, sockdiag.StorageOptions{PerNetNS: perNetNS})
		b.Run(fmt.Sprintf("iterator=%s/sockets=%d", name, marked), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if v, err := r.Read(bg); err != nil || len(v) != marked {
					b.Fatalf("%d values, %v", len(v), err)
				}
			}
		})
	}
}

func BenchmarkForEachNetNS(b *testing.B) {
	l := lab.NewT(b, lab.Options{Pause: true})
	n := l.Node("node1")
	for i := range 20 {
		n.Pod(fmt.Sprintf("p%d", i))
	}
	f := sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: []netip.AddrPort{netip.AddrPortFrom(backend4, 2053)}}
	visited := 0
	for b.Loop() {
		if err := sockdiag.ForEachNetNS(bg, "/proc", func(sockdiag.NetNS) error {
			visited++
			_, _, err := sockdiag.Dump(bg, f, none)
			return err
		}); err != nil && !errors.Is(err, fs.ErrPermission) {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(visited), "us/netns")
}
