// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"errors"
	"fmt"
)

// sum adds 16-bit words.
func sum(b []byte) (s uint64) {
	for ; len(b) >= 2; b = b[2:] {
		s += uint64(be.Uint16(b))
	}
	if len(b) == 1 {
		s += uint64(b[0]) << 8
	}
	return s
}

// fold reduces a sum to 16 bits by adding the carries.
func fold(s uint64) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// pseudo returns the sum of the pseudo header.
func (p Packet) pseudo(length int) uint64 {
	src, dst := p.addrs()
	return sum(src.AsSlice()) + sum(dst.AsSlice()) + uint64(p.Protocol()) + uint64(length)
}

// checksum returns the offset of the transport's checksum, if it has one, and the given
// checksum.
func (p Packet) checksum() (at int, given *uint16) {
	switch {
	case p.TCP != nil:
		return 16, p.TCP.Checksum
	case p.UDP != nil:
		return 6, p.UDP.Checksum
	case p.ICMP != nil:
		return 2, p.ICMP.Checksum
	}
	return 0, nil
}

// rightChecksum returns the checksum of a transport whose checksum is zero.
func (p Packet) rightChecksum(unsummed []byte) uint16 {
	s := sum(unsummed)
	if p.ICMP == nil || p.IPv6 != nil {
		s += p.pseudo(len(unsummed))
	}
	c := ^fold(s)
	if p.UDP != nil && c == 0 {
		return 0xffff // 0 means no checksum
	}
	return c
}

// Verify checks the lengths and checksums of the packet's frame, and as far as possible those
// of a packet quoted in an ICMP error.
func (p Packet) Verify() error { return p.verify(false, false) }

// VerifyPartial is Verify for a packet whose transport checksum a device will fill in: until
// then, it is the sum of the pseudo header.
func (p Packet) VerifyPartial() error { return p.verify(true, false) }

func (p Packet) verify(partial, quoted bool) error {
	whole, err := p.verifyIP(quoted)
	if !whole {
		return err
	}
	err = errors.Join(err, p.verifyTransport(partial))
	if p.ICMP != nil && p.ICMP.Quoted != nil {
		if q := p.ICMP.Quoted.verify(false, true); q != nil {
			err = errors.Join(err, fmt.Errorf("quoted packet: %w", q))
		}
	}
	return err
}

// verifyIP also returns whether the transport is complete.
func (p Packet) verifyIP(quoted bool) (whole bool, err error) {
	rest := len(p.Transport())
	var length *uint16
	var right int
	switch {
	case p.IPv4 != nil:
		header := p.IPv4.header(p.Protocol(), rest)
		length, right = p.IPv4.Length, len(header)+rest
		be.PutUint16(header[10:], 0)
		err = compare("ipv4 checksum", p.IPv4.Checksum, ^fold(sum(header)))
	case p.IPv6 != nil:
		header := p.IPv6.header(p.Protocol(), rest)
		length, right = p.IPv6.Length, len(header)-40+rest
	case p.Ethernet != nil && (p.Ethernet.Type == EtherIPv4 || p.Ethernet.Type == EtherIPv6):
		return false, errors.New("malformed IP header")
	}
	if !quoted { // quoted packets are truncated
		err = errors.Join(err, compare("ip length", length, uint16(right)))
	}
	f, _ := p.Fragment()
	return length == nil && f.whole(), err
}

func (p Packet) verifyTransport(partial bool) error {
	at, given := p.checksum()
	if at == 0 {
		return p.malformed()
	}
	b := p.Transport()
	if p.UDP != nil {
		if err := compare("udp length", p.UDP.Length, uint16(len(b))); err != nil {
			return err
		}
		if given != nil && *given == 0 && p.IPv4 != nil {
			return nil
		}
	}
	if partial {
		got := be.Uint16(b[at:])
		return compare("partial checksum", &got, fold(p.pseudo(len(b))))
	}
	return compare("transport checksum", given, p.rightChecksum(p.unsummed()))
}

// malformed returns an error for a transport without a layer although its protocol has one.
func (p Packet) malformed() error {
	switch proto, v6 := p.Protocol(), p.IPv6 != nil; {
	case proto == ProtoTCP, proto == ProtoUDP, proto == ProtoICMP && !v6, proto == ProtoICMPv6 && v6:
		return fmt.Errorf("malformed header of protocol %d", proto)
	}
	return nil
}

// compare treats both representations of zero as equal, as receivers do: incremental updates
// result in either. (UDP's 0 means no checksum.)
func compare(what string, got *uint16, want uint16) error {
	if got == nil || *got == want || *got^want == 0xffff && (*got == 0 || want == 0) {
		return nil
	}
	return fmt.Errorf("%s %#04x, want %#04x", what, *got, want)
}
