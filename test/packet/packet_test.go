// SPDX-License-Identifier: Apache-2.0

package packet_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tandem-proxy/tandem/test/packet"
)

var (
	client4, vip4 = netip.MustParseAddrPort("198.51.100.1:40000"), netip.MustParseAddrPort("10.96.0.10:80")
	client6, vip6 = netip.MustParseAddrPort("[2001:db8::1]:40000"), netip.MustParseAddrPort("[fd00:10:96::a]:80")
	eth           = packet.Ethernet{Dst: packet.MAC{2, 0, 0, 0, 0, 2}, Src: packet.MAC{2, 0, 0, 0, 0, 1}}
	sameAddr      = cmpopts.EquateComparable(netip.Addr{})
)

// with returns the packet after a change.
func with(p packet.Packet, change func(*packet.Packet)) packet.Packet {
	p = p.Clone()
	change(&p)
	return p
}

func framed(p *packet.Packet) { p.Ethernet = &eth }

// Correct packets and their texts.
var packets = []struct {
	name   string
	packet packet.Packet
	text   string
}{{
	"tcp over ipv4",
	packet.NewTCP(client4, vip4, packet.SYN, nil),
	"ipv4 198.51.100.1 > 10.96.0.10 ttl 64\ntcp 40000 > 80 S seq 0 ack 0 window 65535",
}, {
	"tcp over ipv6 in a frame, with options",
	with(packet.NewTCP(client6, vip6, packet.PSH|packet.ACK, []byte("odd")), func(p *packet.Packet) {
		framed(p)
		p.TCP.Seq, p.TCP.Ack, p.TCP.Options = 1, 2, []byte{2, 4, 5, 0xb4}
	}),
	"eth 02:00:00:00:00:01 > 02:00:00:00:00:02\nipv6 2001:db8::1 > fd00:10:96::a hops 64\n" +
		"tcp 40000 > 80 PA seq 1 ack 2 window 65535 options 020405b4\npayload 3 bytes 6f6464",
}, {
	"udp over ipv4 with options, in a padded frame",
	with(packet.NewUDP(client4, vip4, []byte("x")), func(p *packet.Packet) {
		framed(p)
		p.IPv4.Options = []byte{0x94, 4, 0, 0}
		p.Trailer = make([]byte, 13)
	}),
	"eth 02:00:00:00:00:01 > 02:00:00:00:00:02\nipv4 198.51.100.1 > 10.96.0.10 ttl 64 options 94040000\n" +
		"udp 40000 > 80\npayload 1 bytes 78\ntrailer 13 bytes 00000000000000000000000000",
}, {
	"udp over ipv4 without checksum",
	with(packet.NewUDP(client4, vip4, []byte("x")), func(p *packet.Packet) { p.UDP.Checksum = new(uint16(0)) }),
	"ipv4 198.51.100.1 > 10.96.0.10 ttl 64\nudp 40000 > 80 checksum 0x0000\npayload 1 bytes 78",
}, {
	"udp over ipv6 with extension headers",
	with(packet.NewUDP(client6, vip6, []byte("x")), func(p *packet.Packet) {
		p.IPv6.Extensions = []packet.Extension{
			{Type: packet.ProtoHopByHop, Data: []byte{1, 4, 0, 0, 0, 0}},
			{Type: packet.ProtoDestOptions, Data: []byte{1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
			packet.Fragment{ID: 7}.Extension(),
		}
	}),
	"ipv6 2001:db8::1 > fd00:10:96::a hops 64\nextension 0 010400000000\nextension 60 010c000000000000000000000000\n" +
		"fragment id 7 offset 0\nudp 40000 > 80\npayload 1 bytes 78",
}, {
	"echo",
	packet.NewEcho(client4.Addr(), vip4.Addr(), 1, 2, []byte("abc")),
	"ipv4 198.51.100.1 > 10.96.0.10 ttl 64\nicmp type 8 code 0 rest 0x10002\npayload 3 bytes 616263",
}, {
	"echo over ipv6",
	packet.NewEcho(client6.Addr(), vip6.Addr(), 1, 2, nil),
	"ipv6 2001:db8::1 > fd00:10:96::a hops 64\nicmp type 128 code 0 rest 0x10002",
}, {
	"error",
	packet.NewError(vip4.Addr(), packet.FragNeeded, 1400, packet.NewTCP(client4, vip4, packet.ACK, nil)),
	"ipv4 10.96.0.10 > 198.51.100.1 ttl 64\nicmp type 3 code 4 rest 0x578\n" +
		"  ipv4 198.51.100.1 > 10.96.0.10 ttl 64\n  tcp 40000 > 80 A seq 0 ack 0 window 65535",
}, {
	"another protocol",
	packet.NewProtocol(client6.Addr(), vip6.Addr(), packet.ProtoSCTP, make([]byte, 20)),
	"ipv6 2001:db8::1 > fd00:10:96::a hops 64 protocol 132\npayload 20 bytes 00000000000000000000000000000000 … crc 0fd59b8d",
}, {
	"no IP",
	packet.Packet{Ethernet: &packet.Ethernet{Type: packet.EtherARP}, Payload: []byte{1}},
	"eth 00:00:00:00:00:00 > 00:00:00:00:00:00 type 0x0806\npayload 1 bytes 01",
}}

func TestBuildAndParse(t *testing.T) {
	for _, tc := range packets {
		t.Run(tc.name, func(t *testing.T) {
			b := tc.packet.Build()
			got := packet.ParseIP(b)
			if tc.packet.Ethernet != nil {
				got = packet.Parse(b)
			}
			if d := cmp.Diff(tc.packet, got, sameAddr); d != "" {
				t.Errorf("parsed (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tc.text, got.String()); d != "" {
				t.Errorf("text (-want +got):\n%s", d)
			}
			if err := got.Verify(); err != nil {
				t.Error(err)
			}
		})
	}
}

// Packets that the kernel sent on its loopback device.
func TestForeignBytes(t *testing.T) {
	for _, tc := range []struct{ name, bytes, text, err string }{{
		name:  "reset",
		bytes: "450000280000400040063cce7f0000017f00000100518678000000002d6c9308501400006a900000",
		text:  "ipv4 127.0.0.1 > 127.0.0.1 ttl 64 df\ntcp 81 > 34424 RA seq 0 ack 762090248 window 0",
	}, {
		name: "echo over ipv6",
		bytes: "600a3bb6000f3a4000000000000000000000000000000001000000000000000000000000000000018000fc8e30a60001a1b2c3d4" +
			"e5f607",
		text: "ipv6 ::1 > ::1 hops 64 label 0xa3bb6\nicmp type 128 code 0 rest 0x30a60001\npayload 7 bytes a1b2c3d4e5f607",
	}, {
		name: "segment whose checksum is left to the device",
		bytes: "4500003c4fd240004006ece77f0000017f000001867800512d6c930700000000a002ffd7fe3000000204ffd70402080a1cfdc456" +
			"000000000103030a",
		text: "ipv4 127.0.0.1 > 127.0.0.1 ttl 64 id 20434 df\n" +
			"tcp 34424 > 81 S seq 762090247 ack 0 window 65495 options 0204ffd70402080a1cfdc456000000000103030a checksum 0xfe30",
		err: "transport checksum 0xfe30, want 0x276e",
	}, {
		name:  "error about such a datagram",
		bytes: "45c0003b78790000400103877f0000017f00000103038e7d000000004500001fa4c64000401198057f0000017f0000019c9e0052000bfe1e6f6464",
		text: "ipv4 127.0.0.1 > 127.0.0.1 ttl 64 tos 0xc0 id 30841\nicmp type 3 code 3 rest 0x0\n" +
			"  ipv4 127.0.0.1 > 127.0.0.1 ttl 64 id 42182 df\n  udp 40094 > 82 checksum 0xfe1e\n  payload 3 bytes 6f6464",
		err: "quoted packet: transport checksum 0xfe1e, want 0x9180",
	}} {
		t.Run(tc.name, func(t *testing.T) {
			b, err := hex.DecodeString(tc.bytes)
			if err != nil {
				t.Fatal(err)
			}
			p := packet.ParseIP(b)
			if d := cmp.Diff(tc.text, p.String()); d != "" {
				t.Errorf("text (-want +got):\n%s", d)
			}
			if got := fmt.Sprint(p.Verify()); got != tc.err && (tc.err != "" || got != "<nil>") {
				t.Errorf("verify: got %s, want %s", got, tc.err)
			}
			if err := p.VerifyPartial(); (err == nil) != strings.HasPrefix(tc.err, "transport") {
				t.Errorf("verify partial: %v", err)
			}
		})
	}
}

func TestVerify(t *testing.T) {
	tcp4, udp4, udp6 := packet.NewTCP(client4, vip4, packet.SYN, nil), packet.NewUDP(client4, vip4, nil), packet.NewUDP(client6, vip6, nil)
	for _, tc := range []struct {
		name   string
		packet packet.Packet
		want   string
	}{
		{"ip checksum", with(tcp4, func(p *packet.Packet) { p.IPv4.Checksum = new(uint16(1)) }), "ipv4 checksum 0x0001, want 0x4632"},
		{"ip length", with(tcp4, func(p *packet.Packet) { p.IPv4.Length = new(uint16(41)) }), "ip length 0x0029, want 0x0028"},
		{"ipv6 length", with(udp6, func(p *packet.Packet) { p.IPv6.Length = new(uint16(9)) }), "ip length 0x0009, want 0x0008"},
		{"tcp checksum", with(tcp4, func(p *packet.Packet) { p.TCP.Checksum = new(uint16(0)) }), "transport checksum 0x0000, want 0xdeb3"},
		{"udp checksum", with(udp4, func(p *packet.Packet) { p.UDP.Checksum = new(uint16(1)) }), "transport checksum 0x0001, want 0x2eaf"},
		{"udp length", with(udp4, func(p *packet.Packet) { p.UDP.Length = new(uint16(9)) }), "udp length 0x0009, want 0x0008"},
		{"no checksum", with(udp4, func(p *packet.Packet) { p.UDP.Checksum = new(uint16(0)) }), "<nil>"},
		{"no checksum over ipv6", with(udp6, func(p *packet.Packet) { p.UDP.Checksum = new(uint16(0)) }), "transport checksum 0x0000, want 0x37e3"},
		{"transport too short", with(packet.NewProtocol(client4.Addr(), vip4.Addr(), packet.ProtoTCP, make([]byte, 19)), framed), "malformed header of protocol 6"},
		{"no ip header", packet.Packet{Ethernet: &packet.Ethernet{Type: packet.EtherIPv4}, Payload: make([]byte, 40)}, "malformed IP header"},
		{"quoted ip checksum", packet.NewError(vip4.Addr(), packet.PortUnreachable, 0,
			with(udp4, func(p *packet.Packet) { p.IPv4.Checksum = new(uint16(1)) })), "quoted packet: ipv4 checksum 0x0001, want 0x4633"},
		{"quoted udp checksum", packet.NewError(vip4.Addr(), packet.PortUnreachable, 0,
			with(udp4, func(p *packet.Packet) { p.UDP.Checksum = new(uint16(1)) })), "quoted packet: transport checksum 0x0001, want 0x2eaf"},
		{"quoted and cut short", packet.NewError(vip6.Addr(), packet.PacketTooBig6, 1400,
			packet.NewUDP(client6, vip6, make([]byte, 2000))), "<nil>"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := fmt.Sprint(tc.packet.Verify()); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

// Zero has two representations, one of which means no checksum in UDP.
func TestZeroChecksum(t *testing.T) {
	for _, tc := range []struct {
		name   string
		packet packet.Packet
		at     int // of the checksum
		want   uint16
	}{
		{"tcp", packet.NewTCP(client4, vip4, 0, make([]byte, 2)), 36, 0},
		{"udp", packet.NewUDP(client4, vip4, make([]byte, 2)), 26, 0xffff},
	} {
		p := tc.packet
		// The checksum is the value that makes the total sum zero.
		p.Payload = p.Build()[tc.at : tc.at+2]
		b := p.Build()
		if got := binary.BigEndian.Uint16(b[tc.at:]); got != tc.want {
			t.Errorf("%s: got %#04x, want %#04x", tc.name, got, tc.want)
		}
		if tc.name == "udp" {
			continue // the other zero means no checksum
		}
		binary.BigEndian.PutUint16(b[tc.at:], ^tc.want)
		if err := packet.ParseIP(b).Verify(); err != nil {
			t.Errorf("%s with the other zero: %v", tc.name, err)
		}
	}
}

func TestFragments(t *testing.T) {
	const mtu = 1280
	payload := bytes.Repeat([]byte("0123456789"), 200)
	for _, tc := range []struct {
		whole  packet.Packet
		header int // length of a fragment's headers
	}{
		{with(packet.NewUDP(client4, vip4, payload), func(p *packet.Packet) { p.IPv4.DontFragment = true }), 20},
		{packet.NewUDP(client6, vip6, payload), 48},
	} {
		var together []byte
		for i, f := range tc.whole.Fragments(mtu, 7) {
			b := f.Build()
			if len(b) > mtu || f.IPv4 != nil && f.IPv4.DontFragment {
				t.Errorf("fragment %d has %d bytes:\n%s", i, len(b), f)
			}
			if err := f.Verify(); err != nil {
				t.Error(err)
			}
			place, ok := f.Fragment()
			if want := (packet.Fragment{ID: 7, Offset: len(together), More: i == 0}); !ok || place != want {
				t.Errorf("fragment %d is %+v, want %+v", i, place, want)
			}
			if (f.UDP != nil) != (i == 0) || (f.Destination().Port() == 80) != (i == 0) {
				t.Errorf("fragment %d: ports belong to the first one:\n%s", i, f)
			}
			together = append(together, b[tc.header:]...)
		}
		if want := tc.whole.Transport(); !bytes.Equal(together, want) {
			t.Errorf("together:\n%x\nwant\n%x", together, want)
		}
	}
}

func TestErrorsAreShort(t *testing.T) {
	for _, tc := range []struct {
		about packet.Packet
		want  int
	}{
		{packet.NewUDP(client4, vip4, make([]byte, 2000)), 576},
		{packet.NewUDP(client6, vip6, make([]byte, 2000)), 1280},
		{packet.NewUDP(client4, vip4, nil), 56},
	} {
		p := packet.NewError(tc.about.Destination().Addr(), 0x0300, 0, tc.about)
		if got := len(p.Build()); got != tc.want {
			t.Errorf("got %d bytes, want %d:\n%s", got, tc.want, p)
		}
	}
}

// Old routers quote only eight bytes of the transport.
func TestPortsOfShortQuote(t *testing.T) {
	about := packet.NewTCP(client4, vip4, packet.ACK, nil)
	p := packet.NewError(vip4.Addr(), packet.HostUnreachable, 0, about)
	p.ICMP.Quoted, p.Payload = nil, about.Build()[:28]
	p = packet.ParseIP(p.Build())
	if q := p.ICMP.Quoted; q == nil || q.Source() != client4 || q.Destination() != vip4 {
		t.Errorf("got\n%s", p)
	}
	if err := p.Verify(); err != nil {
		t.Error(err)
	}
}

func FuzzParse(f *testing.F) {
	for _, tc := range packets {
		f.Add(tc.packet.Build())
	}
	for _, p := range packet.NewUDP(client6, vip6, make([]byte, 2000)).Fragments(1280, 1) {
		f.Add(p.Build())
	}
	long := packet.Extension{Type: packet.ProtoRouting, Data: make([]byte, 100*8-2)}
	f.Add(with(packet.NewUDP(client6, vip6, nil), func(p *packet.Packet) { p.IPv6.Extensions = []packet.Extension{long} }).Build())
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, p := range []packet.Packet{packet.Parse(b), packet.ParseIP(b)} {
			if got := p.Build(); !bytes.Equal(got, b) {
				t.Errorf("%x\nbecame\n%x\n%s", b, got, p)
			}
			_, _ = p.Verify(), p.VerifyPartial()
			_, _ = p.Source(), p.Destination()
		}
	})
}
