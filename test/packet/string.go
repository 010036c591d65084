// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"fmt"
	"hash/crc32"
	"strings"
)

// String returns a line for every layer, without fields that have their usual values.
func (p Packet) String() string {
	var s text
	if e := p.Ethernet; e != nil {
		s.line("eth %s > %s", e.Src, e.Dst)
		s.unless(e.Type == 0, "type %#04x", e.Type)
	}
	if h := p.IPv4; h != nil {
		s.line("ipv4 %s > %s ttl %d", h.Src, h.Dst, h.TTL)
		s.unless(h.Protocol == 0, "protocol %d", h.Protocol)
		s.unless(h.TOS == 0, "tos %#02x", h.TOS)
		s.unless(h.ID == 0, "id %d", h.ID)
		s.unless(!h.Reserved, "reserved")
		s.unless(!h.DontFragment, "df")
		s.unless(!h.MoreFragments, "mf")
		s.unless(h.FragmentOffset == 0, "offset %d", h.FragmentOffset)
		s.unless(len(h.Options) == 0, "options %x", h.Options)
		s.given("length", h.Length)
		s.given("checksum", h.Checksum)
	}
	if h := p.IPv6; h != nil {
		s.line("ipv6 %s > %s hops %d", h.Src, h.Dst, h.HopLimit)
		s.unless(h.NextHeader == 0, "protocol %d", h.NextHeader)
		s.unless(h.TrafficClass == 0, "class %#02x", h.TrafficClass)
		s.unless(h.FlowLabel == 0, "label %#05x", h.FlowLabel)
		s.given("length", h.Length)
		for _, x := range h.Extensions {
			if x.Type != ProtoFragment {
				s.line("extension %d %x", x.Type, x.Data)
				continue
			}
			f := x.fragment()
			s.line("fragment id %d offset %d", f.ID, f.Offset)
			s.unless(!f.More, "more")
		}
	}
	if t := p.TCP; t != nil {
		s.line("tcp %d > %d %s seq %d ack %d window %d", t.Src, t.Dst, t.Flags, t.Seq, t.Ack, t.Window)
		s.unless(t.Urgent == 0, "urgent %d", t.Urgent)
		s.unless(len(t.Options) == 0, "options %x", t.Options)
		s.given("checksum", t.Checksum)
	}
	if u := p.UDP; u != nil {
		s.line("udp %d > %d", u.Src, u.Dst)
		s.given("length", u.Length)
		s.given("checksum", u.Checksum)
	}
	if i := p.ICMP; i != nil {
		s.line("icmp type %d code %d rest %#x", i.Type, i.Code, i.Rest)
		s.given("checksum", i.Checksum)
		if i.Quoted != nil {
			s.line("  %s", strings.ReplaceAll(i.Quoted.String(), "\n", "\n  "))
		}
	}
	s.bytes("payload", p.Payload)
	s.bytes("trailer", p.Trailer)
	return s.String()
}

// text is a text that is written line by line.
type text struct{ strings.Builder }

func (s *text) line(format string, args ...any) {
	if s.Len() > 0 {
		s.WriteByte('\n')
	}
	fmt.Fprintf(s, format, args...)
}

// unless adds a field to the line if its value is unusual.
func (s *text) unless(usual bool, format string, args ...any) {
	if !usual {
		fmt.Fprintf(s, " "+format, args...)
	}
}

// given adds an explicit length or checksum, which is a wrong one.
func (s *text) given(what string, value *uint16) {
	if value != nil {
		fmt.Fprintf(s, " %s %#04x", what, *value)
	}
}

// bytes formats the beginning of data, and a hash of the rest.
func (s *text) bytes(what string, b []byte) {
	const shown = 16
	if len(b) > 0 {
		s.line("%s %d bytes %x", what, len(b), b[:min(len(b), shown)])
		s.unless(len(b) <= shown, "… crc %08x", crc32.ChecksumIEEE(b))
	}
}

// String returns a letter for every flag, like tcpdump.
func (f Flags) String() string {
	var s strings.Builder
	for i, letter := range "FSRPAUEC" {
		if f&(1<<i) != 0 {
			s.WriteRune(letter)
		}
	}
	if f > 0xff {
		fmt.Fprintf(&s, "+%#x", uint16(f>>8))
	}
	if s.Len() == 0 {
		return "-"
	}
	return s.String()
}
