// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/netlink"
)

var examples = []Flow{
	{Protocol: inet.UDP, ID: 0x01020304, Source: ap("198.51.100.1:4000"), Destination: ap("10.96.0.10:53"), Replies: ap("10.244.0.1:5353"), Seen: ap("198.51.100.1:4000")},
	{Protocol: inet.UDP, ID: 7, Source: ap("[2001:db8::1]:4000"), Destination: ap("[fd00:10:96::a]:53"), Replies: ap("[fd00:10:96::a]:53"), Seen: ap("[2001:db8::1]:4000")},
	{Protocol: inet.TCP, Zone: 3, Source: ap("198.51.100.1:4000"), Destination: ap("10.96.0.10:53"), Replies: ap("10.244.0.1:5353"), Seen: ap("172.18.0.1:61000")},
}

func ap(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

// entry writes a flow as the kernel does.
func entry(f *Flow) []byte {
	b := deleteRequest(nil, f, 0)[unix.SizeofNlMsghdr:]
	b = appendTuple(b, nl.CTA_TUPLE_REPLY, f.Protocol, f.Replies, f.Seen)
	if f.Zone != 0 {
		b = netlink.Attr(b, attrZone, binary.BigEndian.AppendUint16(nil, f.Zone))
	}
	return b
}

func TestParseFlow(t *testing.T) {
	for _, want := range examples {
		b := entry(&want)
		if got, err := parseFlow(b); err != nil || got != want {
			t.Errorf("parsed %+v, %v; want %+v", got, err, want)
		}
		for n := range b[:len(b)-8] {
			if got, err := parseFlow(b[:n]); err == nil && got == want {
				t.Errorf("%d of %d bytes were enough", n, len(b))
			}
		}
	}
}

// TestZoneOfOneDirection: an entry with a zone in one direction has it in that
// direction's tuple.
func TestZoneOfOneDirection(t *testing.T) {
	for _, direction := range []uint16{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_REPLY} {
		b := entry(&examples[0])
		at := b[genericLen:]
		for binary.NativeEndian.Uint16(at[2:])&nl.NLA_TYPE_MASK != direction {
			at = at[(binary.NativeEndian.Uint16(at)+3)&^3:]
		}
		inner := at[unix.SizeofNlAttr:binary.NativeEndian.Uint16(at)]
		zoned := append(append([]byte{}, inner...), netlink.Attr(nil, attrTupleZone, []byte{0, 9})...)
		b = netlink.Attr(b, direction|unix.NLA_F_NESTED, zoned)
		if f, err := parseFlow(b); err != nil || f.Zone != 9 {
			t.Errorf("zone %d, %v; want 9", f.Zone, err)
		}
	}
}

func FuzzParseFlow(f *testing.F) {
	for i := range examples {
		f.Add(entry(&examples[i]))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if flow, err := parseFlow(b); err == nil && !flow.Destination.IsValid() {
			t.Errorf("parsed %v", flow)
		}
	})
}
