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

// fold makes 16 bits of a sum, the carries added.
func fold(s uint64) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// pseudo is the sum of what a transport checksum covers of the IP header.
func (p Packet) pseudo(length int) uint64 {
	src, dst := p.addrs()
	return sum(src.AsSlice()) + sum(dst.AsSlice()) + uint64(p.Protocol()) + uint64(length)
}

// checksum tells where the transport has its checksum, if anywhere, and which one
// was given.
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

// rightChecksum is the checksum of a transport that has none yet.
func (p Packet) rightChecksum(unsummed []byte) uint16 {
	s := sum(unsummed)
	if p.ICMP == nil || p.IPv6 != nil {
		s += p.pseudo(len(unsummed))
	}
	c := ^fold(s)
	if p.UDP != nil && c == 0 {
		return 0xffff // 0 says that there is none
	}
	return c
}

// Verify checks the lengths and checksums of the frame that the packet makes, and those
// of what an ICMP error in it quotes, as far as they can be.
func (p Packet) Verify() error { return p.verify(false, false) }

// VerifyPartial is Verify for a packet whose transport checksum is left to a device
// further on: until then its place holds the sum of the pseudo header.
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

// verifyIP tells also whether the transport is all there.
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
	if !quoted { // quotes are cut short
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

// malformed complains of a transport that should have had a layer.
func (p Packet) malformed() error {
	switch proto, v6 := p.Protocol(), p.IPv6 != nil; {
	case proto == ProtoTCP, proto == ProtoUDP, proto == ProtoICMP && !v6, proto == ProtoICMPv6 && v6:
		return fmt.Errorf("malformed header of protocol %d", proto)
	}
	return nil
}

// compare takes two ways to write zero for one, as receivers do: incremental updates
// end with either. (UDP's zero is none.)
func compare(what string, got *uint16, want uint16) error {
	if got == nil || *got == want || *got^want == 0xffff && (*got == 0 || want == 0) {
		return nil
	}
	return fmt.Errorf("%s %#04x, want %#04x", what, *got, want)
}
