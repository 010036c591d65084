// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestPacketBare runs the programs for devices without Ethernet headers.
//
// In test runs, the kernel takes the first 14 bytes of a packet for an Ethernet header. So the
// packet must begin like one: the device gets the address that the packet begins with, and
// source addresses have bytes that read as the EtherType. An IPv4 header begins like a multicast
// address, unless it has one word of options.
func TestPacketBare(t *testing.T) {
	p := newPath(t, Options{NodePortRange: onePort})
	p.endsCluster(t)
	programs, err := p.tier.devices.Programs(t.Context(), datapath.Variant{Role: lbmap.RoleUplink, L3: true})
	if err != nil {
		t.Fatal(err)
	}
	p.programs = programs
	const SYN, ACK, RST = packet.SYN, packet.ACK, packet.RST
	for _, e := range []ends{endsOf(0), endsOf(1)} {
		looksRight := map[bool]string{true: "8.0.1.1", false: "2001:db8:86dd::1"}[e.client.Addr().Is4()]
		e.client = netip.AddrPortFrom(netip.MustParseAddr(looksRight), 1000)
		other := netip.AddrPortFrom(e.client.Addr(), 1001) // the replies to port 1000 are those of the Service
		reset := tcp(e.empty, e.client, RST|ACK)
		reset.TCP.Ack, reset.TCP.Window = 1, 0
		for _, test := range []step{
			{in, tcp(e.client, e.local, SYN), next, tcp(e.client, e.here, SYN), "", nil},
			{in, sized(udp(e.client, e.local), 80), next, sized(udp(e.client, e.here), 80), "", nil},
			{in, tcp(e.client, e.remote, SYN), redirect, forwarded(tcp(e.nat, e.there, SYN)), "", nil},
			{in, tcp(e.client, e.empty, SYN), redirect, reset, "", nil},
			{in, tcp(e.client, e.quiet, SYN), shot, same, "", nil},
			{in, tcp(other, e.here, SYN), next, same, "", nil},
		} {
			send, want := withOptions(test.send), withOptions(test.want)
			frame := send.Build()
			p.rename(t, frame[:6])
			err := p.at.Do(func() error {
				got, err := p.run(test.hook, frame)
				if err != nil {
					return err
				}
				if got.Verdict != test.verdict {
					t.Errorf("verdict %d, want %d, for\n%s", got.Verdict, test.verdict, send)
				}
				expected := frame
				if !isNothing(want) {
					expected = want.Build()
				}
				if test.verdict == redirect {
					// bpf_redirect_neigh() takes a link-layer header off.
					expected = append(make([]byte, 14), expected...)
				}
				if test.verdict != shot && string(got.Frame) != string(expected) {
					t.Errorf("got\n%s\nwant\n%s", packet.ParseIP(got.Frame), packet.ParseIP(expected))
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}

func withOptions(p packet.Packet) packet.Packet {
	p = p.Clone()
	if p.IPv4 != nil {
		p.IPv4.Options = []byte{1, 1, 1, 1}
	}
	return p
}
