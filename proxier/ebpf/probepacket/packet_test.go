// SPDX-License-Identifier: Apache-2.0

package probepacket

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestFrame: probes are packets as others parse them.
func TestFrame(t *testing.T) {
	device := net.HardwareAddr{2, 0, 0, 0, 0, 2}
	for _, to := range []netip.AddrPort{netip.MustParseAddrPort("172.18.0.1:80"), netip.MustParseAddrPort("[fd00:18::1]:443")} {
		from, ok := Client(to.Addr().Is6(), false, nil)
		if !ok {
			t.Fatal("no client")
		}
		for _, p := range []Packet{{inet.TCP, from, to, SYN}, {inet.TCP, from, to, RST}, {inet.UDP, from, to, 0}} {
			frame := p.Frame(device)
			q := packet.Parse(frame)
			right := q.Ethernet.Dst == packet.MAC(device) && q.Source() == from && q.Destination() == to && len(q.Payload) == 0
			if p.Protocol == inet.TCP {
				right = right && q.TCP != nil && q.TCP.Flags == packet.Flags(p.Flags)
			} else {
				right = right && q.UDP != nil
			}
			if !right {
				t.Errorf("%v is %v", p, q)
			}
			if got, ok := Destination(frame); !ok || got != to {
				t.Errorf("%v goes to %v", p, got)
			}
		}
	}
}

// TestDestination: what cannot be read goes nowhere, and a packet in another one has no port.
func TestDestination(t *testing.T) {
	p := Packet{Protocol: inet.TCP, From: netip.MustParseAddrPort("192.0.2.1:7"), To: netip.MustParseAddrPort("172.18.0.1:80")}
	frame := p.Frame(make(net.HardwareAddr, 6))
	for n := range 37 {
		if to, ok := Destination(frame[:n]); ok {
			t.Errorf("%d bytes go to %v", n, to)
		}
	}
	frame[l2Len+9] = protoIPIP
	if to, ok := Destination(frame); !ok || to != netip.AddrPortFrom(p.To.Addr(), 0) {
		t.Errorf("a packet in another one goes to %v, %v", to, ok)
	}
	if to, ok := Destination(make([]byte, 100)); ok {
		t.Errorf("zeros go to %v", to)
	}
}

// TestClient: a probe comes from an address that is admitted.
func TestClient(t *testing.T) {
	for _, test := range []struct {
		six, filtered bool
		ranges        string
		want          string // empty for none
	}{
		{false, false, "", "192.0.2.1"},
		{true, false, "", "2001:db8::1"},
		{false, true, "", ""},
		{true, true, "10.0.0.0/8", ""},
		{false, true, "fd00::/8 10.0.0.0/8", "10.0.0.1"},
		{false, true, "10.9.8.7/32", "10.9.8.7"},
		{false, true, "0.0.0.0/0", "192.0.2.1"},
		{false, true, "0.0.0.0/1", "1.0.0.1"},
		{false, true, "0.0.0.0/8", ""},
		{false, true, "127.0.0.0/8 224.0.0.0/4", ""},
		{false, true, "127.0.0.0/8 10.0.0.0/8", "10.0.0.1"},
		{true, true, "::1/128 ff00::/8", ""},
		{true, true, "::/0", "2001:db8::1"},
		{true, true, "fd00::/8", "fd00::1"},
	} {
		var ranges []netip.Prefix
		for text := range strings.FieldsSeq(test.ranges) {
			ranges = append(ranges, netip.MustParsePrefix(text))
		}
		got, ok := Client(test.six, test.filtered, ranges)
		if ok != (test.want != "") || ok && (got.Addr().String() != test.want || got.Port() == 0 || got.Port() > 1023) {
			t.Errorf("%v: %v, %v", test, got, ok)
		}
	}
}
