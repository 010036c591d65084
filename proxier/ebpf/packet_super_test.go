// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestPacketSuper: segments that the kernel merged, or will split later, are compared with the MTU
// by the length of the single segments.
func TestPacketSuper(t *testing.T) {
	p := newPath(t, Options{NodePortRange: onePort})
	p.endsCluster(t)
	for _, e := range []ends{endsOf(proxier.IPv4), endsOf(proxier.IPv6)} {
		headers := len(tcp(e.client, e.remote, 0).Build())
		segments := func(src, dst netip.AddrPort) packet.Packet { return sized(tcp(src, dst, packet.ACK), 3000) }
		datagrams := func(src, dst netip.AddrPort) packet.Packet { return sized(udp(src, dst), 3000) }
		const udpLess = 20 - 8 // the header of UDP is shorter
		tooBig := e.message(packet.FragNeeded, packet.PacketTooBig6)
		for _, test := range []struct {
			name    string
			size    int // of the payload of a segment
			send    packet.Packet
			verdict int32
			want    packet.Packet
		}{
			{"for a backend here", 1460, segments(e.client, e.local), next, segments(e.client, e.here)},
			{"that fits", node2MTU - headers, segments(e.client, e.remote), redirect, forwarded(segments(e.nat, e.there))},
			{"that is too long", node2MTU - headers + 1, segments(e.client, e.remote), redirect, p.icmp(e.remote, tooBig, node2MTU, segments(e.client, e.remote))},
			{"of datagrams that fit", node2MTU - headers + udpLess, datagrams(e.client, e.remote), redirect, forwarded(datagrams(e.nat, e.there))},
			{"of datagrams that are too long", node2MTU - headers + udpLess + 1, datagrams(e.client, e.remote), redirect, p.icmp(e.remote, tooBig, node2MTU, datagrams(e.client, e.remote))},
			{"without a backend", 1000, segments(e.client, e.empty), shot, same},
		} {
			t.Run(e.String()+"/"+test.name, func(t *testing.T) {
				if err := p.reset(); err != nil {
					t.Fatal(err)
				}
				before := p.context
				defer func() { p.context = before }()
				p.context = slices.Clone(before)
				binary.NativeEndian.PutUint32(p.context[skbGSOSize:], uint32(test.size))
				binary.NativeEndian.PutUint32(p.context[skbGSOSegs:], uint32((3000-headers+test.size-1)/test.size))
				send := p.frame(test.send)
				var got datapath.Result
				err := p.at.Do(func() (err error) {
					got, err = p.run(in, send)
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
				if got.Verdict != test.verdict {
					t.Fatalf("verdict %d, want %d", got.Verdict, test.verdict)
				}
				if err := compareFrames(&step{verdict: test.verdict, want: test.want}, send, got.Frame); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// checksumComplete makes a test run pass a packet with a checksum computed by the device, and
// verify afterwards that it still matches the packet: BPF_F_TEST_SKB_CHECKSUM_COMPLETE of
// linux/bpf.h.
const checksumComplete = 1 << 2

// TestPacketDeviceSum: programs update the checksum that the device has computed. Otherwise the
// stack would drop the packets.
func TestPacketDeviceSum(t *testing.T) {
	p := newPath(t, Options{NodePortRange: onePort})
	p.endsCluster(t)
	const SYN, ACK = packet.SYN, packet.ACK
	for _, e := range []ends{endsOf(proxier.IPv4), endsOf(proxier.IPv6)} {
		unreachable := e.message(packet.PortUnreachable, packet.PortUnreachable6)
		for _, test := range []struct {
			name string
			Hook datapath.Hook
			send packet.Packet
		}{
			{"TCP", in, tcp(e.client, e.local, SYN)},
			{"TCP reply", out, tcp(e.here, e.client, SYN|ACK)},
			{"UDP", in, udp(e.client, e.local)},
			{"UDP reply", out, udp(e.here, e.client)},
			{"TCP elsewhere", in, tcp(e.client, e.remote, SYN)},
			{"TCP reply from elsewhere", in, tcp(e.there, e.nat, SYN|ACK)},
			{"UDP elsewhere", in, udp(e.client, e.remote)},
			{"error for a backend here", in, quoting(e.router, unreachable, 0, tcp(e.local, e.client, SYN|ACK), 0)},
			{"error about a backend here", out, quoting(e.here.Addr(), unreachable, 0, tcp(e.client, e.here, SYN), 0)},
			{"error about UDP", out, quoting(e.here.Addr(), unreachable, 0, udp(e.client, e.here), 8)},
			{"error for a backend elsewhere", in, quoting(e.router, unreachable, 0, tcp(e.remote, e.client, SYN|ACK), 0)},
		} {
			t.Run(e.String()+"/"+test.name, func(t *testing.T) {
				opts := ciliumebpf.RunOptions{Data: p.frame(test.send), DataOut: p.out[:largestOut], Context: p.context, Flags: checksumComplete}
				err := p.at.Do(func() error {
					_, err := p.programs[test.Hook].Run(&opts)
					return err
				})
				if err != nil { // EBADMSG
					t.Fatal(err)
				}
				if slices.Equal(opts.DataOut, opts.Data) {
					t.Error("the packet was not translated")
				}
			})
		}
	}
}
