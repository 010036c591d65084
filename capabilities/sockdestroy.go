// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// probeInetDiagDestroy makes a UDP socket of its own, asks the kernel to destroy
// it, and sees whether it is dead. The socket's cookie is part of the request,
// so that no other socket can be hit.
func probeInetDiagDestroy(_ context.Context, h *host, _ string) outcome {
	o := h.fromModules(moduleQuery{module: "udp_diag", symbol: "udp_diag_destroy"})
	if o.state != Yes && !h.opts.LoadModules {
		return o.butMaybeDisabled(h)
	}
	victim, err := newConnectedUDP()
	if err != nil {
		return inconclusive(fmt.Errorf("make a socket to destroy: %w", err))
	}
	defer victim.close()
	switch err := destroySocket(victim.id); {
	case errors.Is(err, unix.EPERM):
		return notPermitted(capNet, err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return no(fmt.Errorf("destroy a socket: %w", err))
	case errors.Is(err, unix.ENOENT) && o.state != Yes:
		// No module handles UDP, not even after the kernel tried to load a module.
		return o
	case err != nil:
		return inconclusive(fmt.Errorf("destroy a socket: %w", err))
	}
	_, _, err = unix.Recvfrom(victim.fd, make([]byte, 1), unix.MSG_DONTWAIT)
	if !errors.Is(err, unix.ECONNABORTED) {
		return inconclusive(fmt.Errorf("the destroyed socket returned: %w", err))
	}
	return yes("")
}

// butMaybeDisabled corrects a module answer: udp_diag can be there without its
// destroy function, which is an option of its own.
func (o outcome) butMaybeDisabled(h *host) outcome {
	if o.state == No {
		if presence, _ := h.module("udp_diag", "udp_diag_dump"); presence == moduleLoaded {
			o.err = errors.New("udp_diag is built without CONFIG_INET_DIAG_DESTROY")
		}
	}
	return o
}

// connectedUDP is a pair of loopback sockets, of which fd is connected to peer.
type connectedUDP struct {
	fd, peer int
	id       socketID
}

// socketID names one IPv4 UDP socket the way sock_diag does.
type socketID struct {
	srcPort, dstPort uint16
	src, dst         [4]byte
	cookie           uint64
}

// noCookie matches any socket with the right addresses.
const noCookie = ^uint64(0)

func newConnectedUDP() (_ *connectedUDP, err error) {
	c := &connectedUDP{fd: -1, peer: -1}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	if c.peer, err = boundUDP(); err != nil {
		return nil, err
	}
	if c.fd, err = boundUDP(); err != nil {
		return nil, err
	}
	local, err := udpAddr(c.fd)
	if err != nil {
		return nil, err
	}
	remote, err := udpAddr(c.peer)
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(c.fd, remote); err != nil {
		return nil, fmt.Errorf("connect over loopback: %w", err)
	}
	cookie, err := unix.GetsockoptUint64(c.fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		// Kernels before 4.12 have no such option; the two ports are ours alone.
		cookie = noCookie
	}
	c.id = socketID{srcPort: uint16(local.Port), dstPort: uint16(remote.Port), src: local.Addr, dst: remote.Addr, cookie: cookie}
	return c, nil
}

func boundUDP() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return -1, errors.Join(fmt.Errorf("bind to loopback: %w", err), unix.Close(fd))
	}
	return fd, nil
}

func udpAddr(fd int) (*unix.SockaddrInet4, error) {
	addr, err := unix.Getsockname(fd)
	if err != nil {
		return nil, fmt.Errorf("getsockname: %w", err)
	}
	v4, ok := addr.(*unix.SockaddrInet4)
	if !ok {
		return nil, fmt.Errorf("getsockname: address of type %T", addr)
	}
	return v4, nil
}

func (c *connectedUDP) close() {
	for _, fd := range []int{c.fd, c.peer} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// destroyRequest is struct inet_diag_req_v2.
type destroyRequest struct{ id socketID }

const destroyRequestLen = 56

func (r destroyRequest) Len() int { return destroyRequestLen }

func (r destroyRequest) Serialize() []byte {
	const anyState = ^uint32(0)
	b := make([]byte, destroyRequestLen)
	b[0], b[1] = unix.AF_INET, unix.IPPROTO_UDP
	binary.NativeEndian.PutUint32(b[4:], anyState)
	binary.BigEndian.PutUint16(b[8:], r.id.srcPort)
	binary.BigEndian.PutUint16(b[10:], r.id.dstPort)
	copy(b[12:], r.id.src[:])
	copy(b[28:], r.id.dst[:])
	// b[44:48] is the interface: any. The cookie is two words, low one first.
	binary.NativeEndian.PutUint32(b[48:], uint32(r.id.cookie))
	binary.NativeEndian.PutUint32(b[52:], uint32(r.id.cookie>>32))
	return b
}

func destroySocket(id socketID) error {
	req := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	req.AddData(destroyRequest{id})
	_, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
	return err
}
