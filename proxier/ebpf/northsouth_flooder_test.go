// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"math/rand/v2"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// flooder sends packets to one address.
type flooder struct {
	wire *wire
	to   netip.AddrPort
	rand *rand.Rand
	pace *pace
	next flood
}

// flood makes the next packet to an address.
type flood func(r *rand.Rand, to netip.AddrPort) packet.Packet

func newFlooder(t testing.TB, from *lab.Client, to netip.AddrPort, seed uint64, pace *pace, next flood) *flooder {
	return &flooder{wire: newWire(t, from, to.Addr()), to: to, rand: rand.New(rand.NewPCG(1, seed)), pace: pace, next: next}
}

func (f *flooder) send(count int) error {
	for range count {
		f.pace.step()
		if err := f.wire.send(f.wire.frame(f.next(f.rand, f.to))); err != nil {
			return err
		}
	}
	return nil
}

// syn is the first segment of a random client.
func syn(r *rand.Rand, to netip.AddrPort) packet.Packet {
	return packet.NewTCP(stranger(r, to.Addr()), to, packet.SYN, nil)
}

// stranger is a random client. Its address is of a range reserved for benchmarks, without a route.
func stranger(r *rand.Rand, family netip.Addr) netip.AddrPort {
	from := netip.AddrFrom4([4]byte{198, 18 + byte(r.IntN(2)), byte(r.Uint32()), byte(r.Uint32())})
	if family.Is6() {
		b := netip.MustParseAddr("2001:2::").As16()
		for i := 8; i < len(b); i++ {
			b[i] = byte(r.Uint32())
		}
		from = netip.AddrFrom16(b)
	}
	return netip.AddrPortFrom(from, uint16(1024+r.IntN(60_000)))
}

// pace limits how many packets flooders may send ahead of those that the programs have seen. Packets
// beyond net.core.netdev_max_backlog are lost before any program sees them, and on a slow machine
// packets of other connections would be lost, too.
type pace struct {
	seen   func() uint64 // counts at least the packets of the flood that the programs have seen
	before uint64        // before the flood
	known  atomic.Uint64 // how many were seen at the last look
	sent   atomic.Uint64
}

func newPace(seen func() uint64) *pace { return &pace{seen: seen, before: seen()} }

// step waits for at most a second, because packets may get lost.
func (p *pace) step() {
	const ahead = 200
	sent := p.sent.Add(1)
	for range 10_000 {
		if p.known.Load()+ahead > sent {
			return
		}
		if p.known.Store(p.seen() - p.before); p.known.Load()+ahead <= sent {
			time.Sleep(100 * time.Microsecond)
		}
	}
}
