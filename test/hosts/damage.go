// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/packet"
)

// damager sends damaged packets to the node: through each device that it shares with the other node, so that tunnels
// carry them, and as damaged packets of tunnels.
type damager struct {
	*rand.Rand
	world *World
	cells []Cell
	wires []wire
	asked int // how many were to be sent by each
}

// wire is a device of that name on both nodes.
type wire struct {
	name     string
	src, dst net.HardwareAddr // of the other node and of this one; nil without Ethernet headers
	sent     int
}

// damaging prepares packets to the addresses that the cells dial.
func (w *World) damaging(cells []Cell) (*damager, error) {
	// The same ones each time, so that a failure comes again.
	d := &damager{Rand: rand.New(rand.NewPCG(1, 2)), world: w, cells: cells}
	own, err := devices(w.Node.Do)
	if err != nil {
		return nil, err
	}
	others, err := devices(w.Other.Do)
	for name, addr := range others {
		if mine, ok := own[name]; ok {
			d.wires = append(d.wires, wire{name: name, src: addr, dst: mine})
		}
	}
	slices.SortFunc(d.wires, func(a, b wire) int { return strings.Compare(a.name, b.name) })
	return d, err
}

// devices are those that are up, but for loopback and pods, with their hardware addresses.
func devices(do func(func() error) error) (map[string]net.HardwareAddr, error) {
	found := map[string]net.HardwareAddr{}
	err := do(func() error {
		list, err := net.Interfaces()
		for _, i := range list {
			if i.Flags&net.FlagUp != 0 && i.Flags&net.FlagLoopback == 0 && !strings.HasPrefix(i.Name, "pod") {
				found[i.Name] = nil
				if len(i.HardwareAddr) == 6 {
					found[i.Name] = i.HardwareAddr
				}
			}
		}
		return err
	})
	return found, err
}

// send sends damaged packets.
func (d *damager) send(count int) error {
	var errs []error
	d.asked += count
	for range count {
		for i := range d.wires {
			w := &d.wires[i]
			inner := d.damage(d.packet())
			if d.IntN(2) == 0 && w.name == "eth0" {
				inner = d.tunnelled(inner)
			}
			err := d.world.Other.SendFrame(w.name, w.frame(inner, d.IntN(8) == 0))
			switch {
			case err == nil:
				w.sent++
			case errors.Is(err, unix.EMSGSIZE), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOBUFS):
				// It is longer or shorter than the device takes.
			default:
				errs = append(errs, fmt.Errorf("send a damaged packet out of %s: %w", w.name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// unsent is an error if packets were to be sent, and none left by a device, or there is none.
func (d *damager) unsent() error {
	if d.asked > 0 && len(d.wires) == 0 {
		return errors.New("no device is shared with the other node")
	}
	for _, w := range d.wires {
		if d.asked > 0 && w.sent == 0 {
			return fmt.Errorf("no damaged packet left by %s", w.name)
		}
	}
	return nil
}

// packet is a request to a Service, or an error about one. Its source port is below those of clients, so that it is of
// no connection that has to go on.
func (d *damager) packet() []byte {
	c := d.cells[d.IntN(len(d.cells))]
	to := d.world.target(c)
	from := netip.AddrPortFrom(d.world.There.Addr4, uint16(1+d.IntN(1023)))
	if to.Addr().Is6() {
		from = netip.AddrPortFrom(d.world.There.Addr6, from.Port())
	}
	payload := make([]byte, d.IntN(64))
	var p packet.Packet
	switch d.IntN(3) {
	case 0:
		p = packet.NewTCP(from, to, packet.Flags(d.IntN(256)), payload)
	case 1:
		p = packet.NewUDP(from, to, payload)
	default:
		message := uint16(packet.NetUnreachable)
		if to.Addr().Is6() {
			message = packet.PacketTooBig6
		}
		p = packet.NewError(from.Addr(), message, uint32(d.IntN(2000)), packet.NewTCP(to, from, packet.ACK, payload))
	}
	return p.Build()
}

// damage truncates a packet, changes a length, an offset or a protocol of its header, or some bits.
func (d *damager) damage(b []byte) []byte {
	switch d.IntN(3) {
	case 0:
		b = b[:d.IntN(len(b))]
	case 1:
		fields := []int{0, 2, 3, 4, 5, 6, 7, 9, 20, 32, 40, 41, 52}
		if at := fields[d.IntN(len(fields))]; at < len(b) {
			b[at] = byte(d.Uint32())
		}
	default:
		for range 1 + d.IntN(4) {
			b[d.IntN(len(b))] ^= 1 << d.IntN(8)
		}
	}
	return b
}

// tunnelled is a packet of some tunnel between the nodes with this one in it, whose own header may be cut off.
func (d *damager) tunnelled(inner []byte) []byte {
	w := d.world
	if !w.Node.Addr4.IsValid() || !slices.Contains(w.families(), IPv4) {
		return inner
	}
	ethernet := make([]byte, 14, 14+len(inner))
	binary.BigEndian.PutUint16(ethernet[12:], packet.EtherIPv4)
	ethernet = append(ethernet, inner...)
	udp := func(port uint16, header []byte, rest []byte) []byte {
		content := append(header, rest...)
		if d.IntN(3) == 0 {
			content = content[:d.IntN(min(len(content), 24))]
		}
		from, to := netip.AddrPortFrom(w.Other.Addr4, 40000), netip.AddrPortFrom(w.Node.Addr4, port)
		return packet.NewUDP(from, to, content).Build()
	}
	raw := func(protocol uint8, content []byte) []byte {
		return packet.NewProtocol(w.Other.Addr4, w.Node.Addr4, protocol, content).Build()
	}
	const protoIPIP, protoIPv6, protoGRE = 4, 41, 47
	switch d.IntN(7) {
	case 0: // flannel's VXLAN
		return udp(8472, []byte{0x08, 0, 0, 0, 0, 0, 1, 0}, ethernet)
	case 1: // Calico's VXLAN
		return udp(4789, []byte{0x08, 0, 0, 0, 0, 4096 >> 8, 0, 0}, ethernet)
	case 2: // Geneve, with options of any length
		return udp(6081, []byte{byte(d.IntN(64)), 0, 0x65, 0x58, 0, 0, 1, 0}, ethernet)
	case 3: // WireGuard, with a message of any type
		return udp(51820, []byte{byte(d.IntN(6)), 0, 0, 0}, inner)
	case 4:
		return raw(protoIPIP, inner)
	case 5:
		return raw(protoIPv6, inner)
	default:
		return raw(protoGRE, append([]byte{byte(d.IntN(256)), 0, 8, 0}, inner...))
	}
}

// frame adds the Ethernet header, if the device has one, and on request two VLAN tags that no device of the node has.
func (w wire) frame(p []byte, tagged bool) []byte {
	if w.dst == nil {
		if len(p) == 0 {
			return []byte{0x45}
		}
		return p
	}
	b := slices.Concat(w.dst, w.src)
	if tagged {
		b = append(b, 0x81, 0x00, 0x00, 0x07, 0x81, 0x00, 0x00, 0x08)
	}
	etherType := uint16(packet.EtherIPv4)
	if len(p) > 0 && p[0]>>4 == 6 {
		etherType = packet.EtherIPv6
	}
	return append(binary.BigEndian.AppendUint16(b, etherType), p...)
}
