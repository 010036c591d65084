// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

// openListeners has listeners of a network namespace accept data in SYNs, without an option of their own (tcp_fastopen of
// Documentation/networking/ip-sysctl.rst).
const openListeners = "1026"

// synData is TCPI_OPT_SYN_DATA of linux/tcp.h: the other end acknowledged data of the SYN.
const synData = 32

// serveFastOpen is serve, with TCP Fast Open (RFC 7413).
func serveFastOpen(t testing.TB, p *lab.Pod) *lab.Pod {
	t.Helper()
	err := p.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/tcp_fastopen", []byte(openListeners), 0) })
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, p)
}

// askFastOpen sends a request that goes into the SYN, once the kernel has a cookie of the address, and reports whether the
// endpoint took it from there.
func askFastOpen(ctx context.Context, from *lab.Sandbox, to netip.AddrPort) (taken bool, err error) {
	var c net.Conn
	err = from.Do(func() (err error) {
		d := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
			if e := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_FASTOPEN_CONNECT, 1) }); e != nil {
				return e
			}
			return err
		}}
		c, err = d.DialContext(ctx, "tcp", to.String())
		return err
	})
	if err != nil {
		return false, err
	}
	defer c.Close()
	if _, err := lab.AskConn(ctx, c); err != nil {
		return false, err
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return false, err
	}
	var info *unix.TCPInfo
	if e := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); e != nil || err != nil {
		return false, fmt.Errorf("read TCP_INFO: %w", err)
	}
	return info.Options&synData != 0, nil
}

// TestFastOpen: data in SYNs of clients outside reach the endpoints of a Service, on the node that is dialed and on others. An endpoint
// that did not give the cookie has the client send them again.
func TestFastOpen(t *testing.T) {
	modes := map[string][]string{}
	for name, flags := range accelerated {
		modes[name] = flags
		modes[name+", XDP"] = append([]string{"--ebpf-acceleration=native"}, flags...)
	}
	for name, flags := range modes {
		t.Run(name, func(t *testing.T) {
			s := newDirectStage(t, serveFastOpen, lab.Options{NoOffload: true, XDP: true})
			defer s.end(t)
			s.startAll(t, flags...)
			ways := over("tcp", outside(s.nodes[0]))
			ways["tcp4 by a node with an endpoint"] = netip.AddrPortFrom(s.nodes[1].Addr4, 30080)
			for way, to := range ways {
				await(t, way+": data of a SYN to be taken", func() error {
					taken, err := askFastOpen(t.Context(), s.far.Sandbox, to)
					if err != nil {
						t.Fatalf("%s: %v", way, err)
					}
					if !taken {
						return errors.New("it was sent again")
					}
					return nil
				})
			}
		})
	}
}
