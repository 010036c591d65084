// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

// TestStaleUDPSockets: a UDP socket that is connected through a VIP to a removed backend is
// closed. Other sockets are left alone.
func TestStaleUDPSockets(t *testing.T) {
	l := lab.NewT(t, lab.Options{Pause: true})
	one := l.Node("node1")
	a, b, client := serve(t, one.Pod("a")), serve(t, one.Pod("b")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go n.tier.Run(ctx)
	n.OnServiceAdd(dualService())
	n.setPods(a)
	n.sync(t)

	dial := func(network string, to netip.AddrPort) net.Conn {
		t.Helper()
		c, err := client.Dial(t.Context(), network, to)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := lab.AskConn(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	stale := []net.Conn{
		dial("udp", netip.AddrPortFrom(vip4, 80)), dial("udp", netip.AddrPortFrom(vip6, 80)),
		dial("udp", netip.AddrPortFrom(netip.AddrFrom16(vip4.As16()), 80)),
	}
	kept := []net.Conn{
		dial("udp", netip.AddrPortFrom(a.Addr4, targetPort)), dial("tcp", netip.AddrPortFrom(vip4, 80)),
	}
	n.setPods(b)
	start := time.Now()
	n.sync(t)
	for _, c := range stale {
		if err := c.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 16)); !errors.Is(err, unix.ECONNABORTED) {
			t.Errorf("%s: read returned %v", c.RemoteAddr(), err)
		}
	}
	took := time.Since(start)
	t.Logf("closed after %v", took)
	for _, c := range kept {
		if _, err := lab.AskConn(t.Context(), c); err != nil {
			t.Errorf("%s %s: %v", c.RemoteAddr().Network(), c.RemoteAddr(), err)
		}
	}

	// A socket that its owner disconnected is left alone, although its storage still has the
	// backend.
	loose := dial("udp", netip.AddrPortFrom(vip4, 80))
	raw, err := loose.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		sa := make([]byte, unix.SizeofSockaddrInet4) // AF_UNSPEC
		if _, _, errno := unix.Syscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&sa[0])), uintptr(len(sa))); errno != 0 {
			t.Errorf("disconnect: %v", errno)
		}
	}); err != nil {
		t.Fatal(err)
	}
	n.setPods(a)
	n.sync(t)
	if closed, err := n.tier.sockets.CloseNow(t.Context()); closed != 0 || err != nil {
		t.Errorf("a disconnected socket: %d closed, error %v", closed, err)
	}
	loose.Close()
	n.setPods(b)
	n.sync(t)

	// The next process closes sockets whose backend was removed while no process ran.
	late := dial("udp", netip.AddrPortFrom(vip4, 80))
	stop()
	n.setPods(a)
	n.sync(t)
	n.close()
	n.start(t, Options{})
	ctx, stop = context.WithCancel(t.Context())
	defer stop()
	go n.tier.Run(ctx)
	n.OnServiceAdd(dualService())
	n.setPods(a)
	n.sync(t)
	if err := late.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := late.Read(make([]byte, 16)); !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("after a restart: read returned %v", err)
	}
}

// TestClosedSocketsAreNotStale: sockets that their owners closed are not counted as closed by
// the proxy, although the kernel keeps their storage for a moment.
func TestClosedSocketsAreNotStale(t *testing.T) {
	l := lab.NewT(t, lab.Options{Pause: true})
	one := l.Node("node1")
	a, client := serve(t, one.Pod("a")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	for range 20 {
		n.OnServiceAdd(dualService())
		n.setPods(a)
		n.sync(t)
		for range 20 {
			if _, err := client.Ask(t.Context(), "udp", netip.AddrPortFrom(vip4, 80)); err != nil {
				t.Fatal(err)
			}
		}
		n.setPods()
		n.sync(t)
		if closed, err := n.tier.sockets.CloseNow(t.Context()); closed != 0 || err != nil {
			t.Fatalf("%d sockets were closed, error %v", closed, err)
		}
	}
}
