// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

// forward starts the proxy of a mesh in a pod, to which rules redirect the connections that the
// pod makes. It connects to where they were going, with a mark that those rules let pass.
func (w *World) forward(pod *lab.Pod, port uint16) error {
	for _, f := range w.families() {
		var listener net.Listener
		err := pod.Do(func() (err error) {
			listener, err = net.Listen("tcp"+string(f), fmt.Sprintf(":%d", port))
			return err
		})
		if err != nil {
			return fmt.Errorf("start the mesh's proxy in %s: %w", pod.Name, err)
		}
		w.open = append(w.open, listener)
		go func() {
			for {
				c, err := listener.Accept()
				if err != nil {
					return
				}
				go w.relay(pod, c.(*net.TCPConn))
			}
		}()
	}
	return nil
}

// relay carries a connection to its original destination.
func (w *World) relay(pod *lab.Pod, from *net.TCPConn) {
	defer from.Close()
	to, err := originalDestination(from)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
		failed := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, w.ForwardMark) })
		return errors.Join(failed, err)
	}}
	var conn net.Conn
	if err := pod.Do(func() (err error) { conn, err = dialer.DialContext(ctx, "tcp", to.String()); return err }); err != nil {
		_ = from.SetLinger(0) // a reset, as from the destination
		return
	}
	defer conn.Close()
	var both sync.WaitGroup
	for _, way := range [][2]*net.TCPConn{{from, conn.(*net.TCPConn)}, {conn.(*net.TCPConn), from}} {
		both.Go(func() {
			_, _ = io.Copy(way[1], way[0])
			_ = way[1].CloseWrite()
			_ = way[0].SetReadDeadline(time.Now())
		})
	}
	both.Wait()
}

// originalDestination is where a redirected connection was going.
func originalDestination(c *net.TCPConn) (to netip.AddrPort, err error) {
	const originalDst = 80 // SO_ORIGINAL_DST, and IP6T_SO_ORIGINAL_DST
	raw, err := c.SyscallConn()
	if err != nil {
		return to, err
	}
	level := unix.SOL_IPV6
	if c.LocalAddr().(*net.TCPAddr).IP.To4() != nil {
		level = unix.SOL_IP
	}
	var addr unix.RawSockaddrInet6
	size := uint32(unsafe.Sizeof(addr))
	failed := raw.Control(func(fd uintptr) {
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, uintptr(level), originalDst,
			uintptr(unsafe.Pointer(&addr)), uintptr(unsafe.Pointer(&size)), 0); errno != 0 {
			err = errno
		}
	})
	if err = errors.Join(failed, err); err != nil {
		return to, fmt.Errorf("read the original destination: %w", err)
	}
	port := addr.Port>>8 | addr.Port<<8
	if level == unix.SOL_IPV6 {
		return netip.AddrPortFrom(netip.AddrFrom16(addr.Addr), port), nil
	}
	four := (*unix.RawSockaddrInet4)(unsafe.Pointer(&addr))
	return netip.AddrPortFrom(netip.AddrFrom4(four.Addr), port), nil
}
