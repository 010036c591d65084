// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/packet"
)

// Captured is a packet as it passed a device.
type Captured struct {
	packet.Packet
	Frame    []byte
	Time     time.Time // when the kernel saw it
	Outgoing bool      // out of the device
	// Partial says that the device must fill in the transport checksum. A veth pair does
	// not, and its receiver does not check it.
	Partial bool
}

// Verify checks all checksums. A partial one must be that of the pseudo header. Packets
// quoted in ICMP errors may have partial checksums as well, without any sign of it;
// Options.NoOffload avoids that.
func (c Captured) Verify() error {
	if c.Partial {
		return c.Packet.VerifyPartial()
	}
	return c.Packet.Verify()
}

func (c Captured) String() string {
	direction := "in"
	if c.Outgoing {
		direction = "out"
	}
	return fmt.Sprintf("%s %s %s", c.Time.Format("05.000000"), direction, strings.ReplaceAll(c.Packet.String(), "\n", " | "))
}

// Capture collects the packets that pass a device.
type Capture struct {
	where   string
	keep    func(Captured) bool
	parse   func([]byte) packet.Packet
	socket  *os.File
	sandbox *Sandbox
	ended   chan struct{} // closed by the reader
	closing sync.Once
	result  error

	mu      sync.Mutex
	packets []Captured
	next    int           // index of the first packet for Expect
	more    chan struct{} // closed when packets grow
}

// captureBuffer has room for what arrives while the reader is not scheduled.
const captureBuffer = 64 << 20

// Capture starts collecting the packets that keep accepts, all of them if it is nil. It
// sees incoming packets before tc programs, and outgoing ones after them. A super-packet
// (GSO) counts as one packet. The capture ends with the sandbox at the latest.
func (s *Sandbox) Capture(device string, keep func(Captured) bool) (*Capture, error) {
	c := &Capture{
		where: device + " of " + s.Name, keep: keep, parse: packet.Parse, sandbox: s,
		ended: make(chan struct{}), more: make(chan struct{}),
	}
	err := s.Do(func() error {
		link, err := s.nl.LinkByName(device)
		if err != nil {
			return fmt.Errorf("find link: %w", err)
		}
		if encapsulation := link.Attrs().EncapType; encapsulation != "ether" && encapsulation != "loopback" {
			c.parse = packet.ParseIP // frames have no Ethernet header
		}
		// Protocol 0 receives nothing, so that no other device gets in before bind.
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		c.socket = os.NewFile(uintptr(fd), "capture")
		if err := errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1),
		); err != nil {
			return errors.Join(os.NewSyscallError("setsockopt", err), c.socket.Close())
		}
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: hton(unix.ETH_P_ALL), Ifindex: link.Attrs().Index})
		if err != nil {
			return errors.Join(os.NewSyscallError("bind", err), c.socket.Close())
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("capture on %s: %w", c.where, err)
	}
	go c.read()
	return c, s.keep(c)
}

// read collects until the socket is closed.
func (c *Capture) read() {
	defer close(c.ended)
	raw, err := c.socket.SyscallConn()
	if err != nil {
		return
	}
	buf, oob := make([]byte, 128<<10), make([]byte, 256)
	for {
		var n, nOOB int
		var from unix.Sockaddr
		var failure error
		err := raw.Read(func(fd uintptr) bool {
			n, nOOB, _, from, failure = unix.Recvmsg(int(fd), buf, oob, 0)
			return !errors.Is(failure, unix.EAGAIN)
		})
		if err != nil {
			return
		}
		if failure != nil {
			continue // the device went down; it may come back
		}
		got := Captured{Packet: c.parse(buf[:n]), Frame: slices.Clone(buf[:n])}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok {
			got.Outgoing = ll.Pkttype == unix.PACKET_OUTGOING
		}
		got.read(oob[:nOOB])
		if c.keep == nil || c.keep(got) {
			c.add(got)
		}
	}
}

// read returns a packet with its metadata.
func (c *Captured) read(oob []byte) {
	messages, _ := unix.ParseSocketControlMessage(oob)
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_TIMESTAMPNS:
			ts := (*unix.Timespec)(unsafe.Pointer(&m.Data[0]))
			c.Time = time.Unix(ts.Unix())
		case m.Header.Level == unix.SOL_PACKET && m.Header.Type == unix.PACKET_AUXDATA:
			c.Partial = binary.NativeEndian.Uint32(m.Data)&unix.TP_STATUS_CSUMNOTREADY != 0
		}
	}
}

func (c *Capture) add(p Captured) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.packets = append(c.packets, p)
	close(c.more)
	c.more = make(chan struct{})
}

// Packets returns the packets collected so far. To prove that a packet did not arrive,
// send another one after it, and call Expect for that one first.
func (c *Capture) Packets() []Captured {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.packets)
}

// Expect waits for a packet that matches, and returns the first one after the packet that
// the last Expect returned. Without a deadline in ctx it times out after two seconds.
func (c *Capture) Expect(ctx context.Context, match func(Captured) bool) (Captured, error) {
	ctx, cancel := withDeadline(ctx, dialTimeout)
	defer cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := c.next; ; i++ {
		for i == len(c.packets) {
			more := c.more
			c.mu.Unlock()
			select {
			case <-more:
			case <-ctx.Done():
			}
			c.mu.Lock()
			if i == len(c.packets) && ctx.Err() != nil {
				return Captured{}, fmt.Errorf("expect a packet on %s: %w; seen:\n%s", c.where, ctx.Err(), c.text())
			}
		}
		if match(c.packets[i]) {
			c.next = i + 1
			return c.packets[i], nil
		}
	}
}

// text lists the last packets.
func (c *Capture) text() string {
	const shown = 20
	var b strings.Builder
	for _, p := range c.packets[max(0, len(c.packets)-shown):] {
		fmt.Fprintf(&b, "  %s\n", p)
	}
	return b.String()
}

// Close ends the capture. It returns an error if packets were lost, as the absence of a
// packet then proves nothing.
func (c *Capture) Close() error {
	c.closing.Do(func() {
		c.sandbox.forget(c)
		c.result = wrap(errors.Join(c.complete(), c.socket.Close()), "capture on %s", c.where)
		<-c.ended
	})
	return c.result
}

// complete asks the kernel whether the reader was too slow.
func (c *Capture) complete() error {
	raw, err := c.socket.SyscallConn()
	if err != nil {
		return err
	}
	var stats *unix.TpacketStats
	failure := raw.Control(func(fd uintptr) {
		stats, err = unix.GetsockoptTpacketStats(int(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS)
	})
	if err = errors.Join(failure, err); err == nil && stats.Drops > 0 {
		err = fmt.Errorf("%d packets were lost", stats.Drops)
	}
	return err
}

func hton(v uint16) uint16 { return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v)) }
