// SPDX-License-Identifier: Apache-2.0

package probepacket

import (
	"encoding/binary"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// Flags of TCP segments.
const (
	SYN = 0x02
	RST = 0x04
)

const (
	l2Len   = 14
	ipv4Len = 20
	ipv6Len = 40
	tcpLen  = 20
	udpLen  = 8

	protoIPIP, protoIPv6 = 4, 41
	optionLen            = 24 // of IPv6
	portGeneve           = 6081
	ttl                  = 64
)

// Packet is one of a client to a frontend.
type Packet struct {
	Protocol inet.Protocol // TCP or UDP
	From, To netip.AddrPort
	Flags    byte // of TCP
}

// Client is an address from which a probe may come, and a port that clients do not choose; false if none may. Where only ranges are
// admitted, the address is in one of them; otherwise it is one for documentation (RFC 5737, RFC 3849), which no client has.
func Client(six, filtered bool, ranges []netip.Prefix) (netip.AddrPort, bool) {
	addr := netip.AddrFrom4([4]byte{192, 0, 2, 1})
	if six {
		addr = netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 1})
	}
	if filtered && !slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(addr) }) {
		at := slices.IndexFunc(ranges, func(r netip.Prefix) bool { return r.Addr().Is6() == six && isHost(within(r)) })
		if at < 0 {
			return netip.AddrPort{}, false
		}
		addr = within(ranges[at])
	}
	return netip.AddrPortFrom(addr, uint16(1+ports.Add(1)%1023)), true
}

// ports takes ports in turn: what a probe of UDP leaves behind has ended before its port is used again. A process before this one
// began elsewhere.
var ports = func() *atomic.Uint32 {
	next := new(atomic.Uint32)
	next.Store(rand.Uint32N(1023))
	return next
}()

// within is some address in a range: none of a network, unless the range has one address alone, and none that means no other host if there
// is a further one.
func within(r netip.Prefix) netip.Addr {
	a := r.Masked().Addr()
	if first := netip.AddrFrom4([4]byte{1, 0, 0, 1}); a.Is4() && !isHost(a) && r.Contains(first) {
		return first
	}
	if !r.IsSingleIP() {
		a = a.Next()
	}
	return a
}

// isHost reports whether another host can have an address: programs take no new connection from others.
func isHost(a netip.Addr) bool {
	return a.IsGlobalUnicast() && !(a.Is4() && a.As4()[0] == 0)
}

// Frame is the packet as it comes in by an Ethernet device with this address. It has no checksums: programs do not verify any.
func (p *Packet) Frame(device net.HardwareAddr) []byte {
	l4 := udpLen
	if p.Protocol == inet.TCP {
		l4 = tcpLen
	}
	b := make([]byte, 0, l2Len+ipv6Len+l4)
	b = append(b, device...)
	b = append(b, 2, 0, 0, 0, 0, 1) // locally administered
	if p.To.Addr().Is4() {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IP)
		b = append(b, 0x45, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(ipv4Len+l4))
		b = append(b, 0, 0, 0x40, 0, ttl, byte(p.Protocol), 0, 0) // not to be fragmented
	} else {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IPV6)
		b = append(b, 0x60, 0, 0, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(l4))
		b = append(b, byte(p.Protocol), ttl)
	}
	b = append(b, p.From.Addr().AsSlice()...)
	b = append(b, p.To.Addr().AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, p.From.Port())
	b = binary.BigEndian.AppendUint16(b, p.To.Port())
	if p.Protocol == inet.UDP {
		b = binary.BigEndian.AppendUint16(b, udpLen)
		return append(b, 0, 0)
	}
	b = append(b, 0, 0, 0, 1, 0, 0, 0, 0, tcpLen/4<<4, p.Flags)
	b = binary.BigEndian.AppendUint16(b, 1<<14) // window
	return append(b, 0, 0, 0, 0)
}

// Destination is where a frame goes. It is without port if another packet is in it (direct server return).
func Destination(frame []byte) (to netip.AddrPort, ok bool) {
	if len(frame) < l2Len {
		return netip.AddrPort{}, false
	}
	packet := frame[l2Len:]
	var protocol byte
	var addr netip.Addr
	var l4 []byte
	switch kind := binary.BigEndian.Uint16(frame[l2Len-2:]); {
	case kind == unix.ETH_P_IP && len(packet) >= ipv4Len && len(packet) >= int(packet[0]&15)*4:
		protocol, l4 = packet[9], packet[int(packet[0]&15)*4:]
		addr = netip.AddrFrom4([4]byte(packet[16:20]))
	case kind == unix.ETH_P_IPV6 && len(packet) >= ipv6Len:
		protocol, l4 = packet[6], packet[ipv6Len:]
		addr = netip.AddrFrom16([16]byte(packet[24:40]))
		if protocol == unix.IPPROTO_DSTOPTS && len(l4) >= optionLen {
			protocol, l4 = l4[0], l4[optionLen:]
		}
	default:
		return netip.AddrPort{}, false
	}
	if protocol == protoIPIP || protocol == protoIPv6 {
		return netip.AddrPortFrom(addr, 0), true
	}
	if len(l4) < 4 {
		return netip.AddrPort{}, false
	}
	port := binary.BigEndian.Uint16(l4[2:])
	if protocol == byte(inet.UDP) && port == portGeneve {
		port = 0
	}
	return netip.AddrPortFrom(addr, port), true
}
