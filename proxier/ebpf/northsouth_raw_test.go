// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// wire sends many frames from a client. It is faster than lab.Sandbox.Send, which looks up the
// next hop for each packet.
type wire struct {
	fd     int
	header packet.Ethernet
}

// newWire returns a wire to the next hop of the client's packets to an address.
func newWire(t testing.TB, from *lab.Client, to netip.Addr) *wire {
	t.Helper()
	c, err := from.Capture(lab.Uplink, func(c lab.Captured) bool { return c.Outgoing && c.Destination().Addr() == to })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	// The probe is sent only to learn its Ethernet header.
	probe := packet.NewUDP(netip.AddrPortFrom(addrOf(from.Sandbox, to), 9), netip.AddrPortFrom(to, 9), nil)
	if err := from.Send(t.Context(), probe); err != nil {
		t.Fatal(err)
	}
	sent, err := c.Expect(t.Context(), func(lab.Captured) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{header: *sent.Ethernet}
	err = from.Do(func() error {
		device, err := net.InterfaceByName(lab.Uplink)
		if err != nil {
			return err
		}
		if w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return os.NewSyscallError("socket", err)
		}
		return os.NewSyscallError("bind", unix.Bind(w.fd, &unix.SockaddrLinklayer{Ifindex: device.Index}))
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(w.fd) })
	return w
}

// frame returns the packet as it leaves the client.
func (w *wire) frame(p packet.Packet) []byte {
	p.Ethernet = &w.header
	return p.Build()
}

func (w *wire) send(frame []byte) error {
	for {
		_, err := unix.Write(w.fd, frame)
		if !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("send", err)
		}
	}
}
