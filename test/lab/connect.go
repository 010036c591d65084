// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Connect makes a veth pair between two sandboxes. Its devices are down and have no
// addresses.
func Connect(a *Sandbox, deviceA string, b *Sandbox, deviceB string, mtu int) error {
	err := a.nl.LinkAdd(&netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: deviceA, MTU: mtu},
		PeerName:      deviceB,
		PeerMTU:       uint32(mtu),
		PeerNamespace: netlink.NsFd(int(b.ns.Fd())),
	})
	return wrap(err, "connect %s of %s to %s of %s", deviceA, a.Name, deviceB, b.Name)
}

// Tunnel makes a TUN device in each of two sandboxes, and carries the packets between them. The
// devices are down and have no addresses. They have no Ethernet header and
// no neighbours, like those of WireGuard and IPIP, which not all kernels have. The tunnel
// ends with either sandbox.
func Tunnel(a *Sandbox, deviceA string, b *Sandbox, deviceB string) error {
	t := &tunnel{}
	for _, end := range []struct {
		*Sandbox
		device string
	}{{a, deviceA}, {b, deviceB}} {
		f, err := end.openTun(end.device)
		if err != nil {
			return errors.Join(fmt.Errorf("create tunnel %s in %s: %w", end.device, end.Name, err), t.Close())
		}
		t.ends = append(t.ends, f)
	}
	for i, from := range t.ends {
		t.running.Go(func() { carry(from, t.ends[1-i]) })
	}
	return errors.Join(a.keep(t), b.keep(t))
}

// tunnel is an open pair of TUN devices.
type tunnel struct {
	ends    []*os.File
	running sync.WaitGroup
	closing sync.Once
}

// Close removes both devices.
func (t *tunnel) Close() error {
	t.closing.Do(func() {
		for _, f := range t.ends {
			_ = f.Close()
		}
		t.running.Wait()
	})
	return nil
}

// tunQueue is how many packets wait in a TUN device to be carried. The default of 500 is less than a few
// transfers at once send while a busy machine has no time for this process.
const tunQueue = 1 << 14

// setQueue sets the length of a device's queue, in packets.
func (s *Sandbox) setQueue(device string, packets int) error {
	link, err := s.nl.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s: %w", device, err)
	}
	return wrap(s.nl.LinkSetTxQLen(link, packets), "set the length of the queue of %s", device)
}

func (s *Sandbox) openTun(device string) (f *os.File, err error) {
	err = s.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: "/dev/net/tun", Err: err}
		}
		request, err := unix.NewIfreq(device)
		if err == nil {
			request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
		}
		if err != nil {
			return errors.Join(os.NewSyscallError("ioctl TUNSETIFF", err), unix.Close(fd))
		}
		f = os.NewFile(uintptr(fd), device)
		return s.setQueue(device, tunQueue)
	})
	return f, err
}

// carry ends when the source is closed. Packets that the other end does not accept are lost,
// as while it is down.
func carry(from, to *os.File) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = to.Write(buf[:n])
		}
	}
}
