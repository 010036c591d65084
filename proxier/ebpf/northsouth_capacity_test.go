// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable/flowtabletest"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// crowd are connections that fill the flow table.
type crowd struct {
	*edge
	opts    Options
	servers map[[2]string]*lab.Server // by network and name of the pod
	open    []*visit
	// flooders counts those there were.
	flooders uint64
}

// TestCapacity: when as many connections are established as the flow table is for, they stay usable
// whatever arrives, whichever end speaks first, and new ones are refused.
func TestCapacity(t *testing.T) {
	const tcp, udp, young = 64, 16, 128
	c := &crowd{servers: map[[2]string]*lab.Server{}, opts: Options{Sizes: lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 16, OptOuts: 16,
		TCPFlows: tcp, UDPFlows: udp, YoungFlows: young}}}
	c.edge = newEdge(t, c.opts)
	for _, pod := range []*lab.Pod{c.here, c.there} {
		for network, start := range map[string]func(uint16) (*lab.Server, error){"tcp": pod.ServeTCP, "udp": pod.ServeUDP} {
			server, err := start(targetPort)
			if err != nil {
				t.Fatal(err)
			}
			c.servers[[2]string{network, pod.Name}] = server
		}
	}
	c.use(t, c.here, c.there)
	t.Logf("flow table: %d KiB", flowtable.Memory(c.opts.Sizes)>>10)

	c.fill(t, "udp", udp)
	c.flood(t, "UDP while there is room for TCP", "dropped_no_flow", datagram)
	c.fill(t, "tcp", tcp) // UDP takes no room from TCP
	for _, f := range []struct {
		name, as string
		next     flood
	}{
		{"SYNs", "dropped_no_flow", syn},
		{"segments of no connection", "dropped_no_flow", func(r *rand.Rand, to netip.AddrPort) packet.Packet {
			return packet.NewTCP(stranger(r, to.Addr()), to, packet.ACK, []byte("?"))
		}},
		{"resets of no connection", "passed_reset", func(r *rand.Rand, to netip.AddrPort) packet.Packet {
			return packet.NewTCP(stranger(r, to.Addr()), to, packet.RST, nil)
		}},
		{"forged resets", "", c.forgedResets(t)},
		{"UDP", "dropped_no_flow", datagram},
		{"first fragments", "dropped_no_flow", fragmentAt(0)},
		{"later fragments", "passed_fragment", fragmentAt(1)},
	} {
		c.flood(t, f.name, f.as, f.next)
	}
	c.audit(t)

	for _, changed := range []bool{false, true} {
		if changed { // flows move to other maps, with room for fewer
			c.opts.Sizes.TCPFlows, c.opts.Sizes.UDPFlows = tcp/2, udp/2
		}
		c.close()
		c.begin(t, c.opts, nil)
		c.use(t, c.here, c.there)
		c.check(t, "after a restart")
		c.flood(t, "SYNs after a restart", "dropped_no_flow", syn)
	}

	// There is room again when connections have ended.
	for _, v := range c.open {
		if v.entry.network == "tcp" {
			lab.HangUp(t.Context(), v.conn)
		}
	}
	c.visit(t, c.entries("tcp")[0])
}

// fill opens connections until no more are admitted.
func (c *crowd) fill(t *testing.T, network string, limit int) {
	t.Helper()
	entries := c.entries(network)
	for i := range limit {
		v := c.visit(t, entries[i%len(entries)])
		v.want(t, v.server) // the second request establishes UDP
		c.open = append(c.open, v)
	}
	// What is admitted nevertheless has to stay.
	for i := range limit {
		v, err := c.tryVisit(shortly(t), t, entries[i%len(entries)])
		if err != nil {
			break
		}
		v.want(t, v.server)
		c.open = append(c.open, v)
	}
	c.check(t, "before floods")
}

// flood sends packets, uses all connections meanwhile, and checks them afterwards. as is the result
// that the programs count for its packets; empty for any.
func (c *crowd) flood(t *testing.T, name, as string, next flood) {
	t.Helper()
	const clients = 2
	count := kernel.Rounds(5000)
	counts := counted{tier: c.tier}
	counts.since(t)
	pace := newPace(func() (sum uint64) {
		list, err := c.tier.Packets()
		if err != nil {
			t.Error(err)
		}
		for _, p := range list {
			sum += p.Count
		}
		return sum
	})
	var flooding sync.WaitGroup
	for _, to := range []netip.AddrPort{netip.AddrPortFrom(c.at.Addr4, nodePort), netip.AddrPortFrom(lb6, lbPort)} {
		c.flooders++ // other clients than before
		f := newFlooder(t, c.client, to, c.flooders, pace, next)
		flooding.Go(func() {
			if err := f.send(count); err != nil {
				t.Error(err)
			}
		})
	}
	flooded := make(chan struct{})
	go func() { flooding.Wait(); close(flooded) }()
	for done := false; !done; {
		select {
		case <-flooded:
			done = true
		default:
		}
		c.check(t, name)
	}
	// The kernel may drop some before any program sees them.
	if since := counts.since(t); as != "" && since[as] < uint64(clients*count*9/10) {
		t.Errorf("%s: of %d packets %v", name, clients*count, since)
	}
	// Flows that closed are ended.
	timeouts := flowtable.DefaultTimeouts()
	if _, err := c.tier.flowTable.Sweep(t.Context(), &timeouts, flowtable.MonotonicSeconds()+uint32(timeouts.Closed/time.Second)+2); err != nil {
		t.Fatal(err)
	}
	c.check(t, "after "+name)
}

// check uses each connection: first the backend sends, then the client. It fails if one is lost.
func (c *crowd) check(t *testing.T, when string) {
	t.Helper()
	for _, v := range c.open {
		if err := c.speak(t.Context(), v); err != nil {
			t.Fatalf("%s: %s to %s: %v", when, v.entry, v.server, err)
		}
	}
	for counter, network := range map[int]string{lbmap.FlowKeptTCP: "tcp", lbmap.FlowKeptUDP: "udp"} {
		want := 0
		for _, v := range c.open {
			if v.entry.network == network {
				want++
			}
		}
		if kept := c.tier.flowTable.Count(counter); kept != uint64(want) {
			t.Fatalf("%s: %d flows of %s are kept, want %d", when, kept, network, want)
		}
	}
}

// speak has both ends of a connection speak.
func (c *crowd) speak(ctx context.Context, v *visit) error {
	if err := c.servers[[2]string{v.entry.network, v.server}].SpeakTo(v.peer); err != nil {
		return err
	}
	heard, hearErr := lab.Hear(ctx, v.conn)
	asked, askErr := lab.AskConn(ctx, v.conn)
	if err := errors.Join(hearErr, askErr); err != nil {
		return fmt.Errorf("the backend spoke first: %v; the client did: %v", hearErr, askErr)
	}
	if heard.Server != v.server || asked.Server != v.server {
		return fmt.Errorf("heard %v, and asked %v", heard, asked)
	}
	return nil
}

// hostOrder converts a number from network byte order.
func hostOrder(n uint32) uint32 {
	return binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, n))
}

// datagram is one of a random client.
func datagram(r *rand.Rand, to netip.AddrPort) packet.Packet {
	return packet.NewUDP(stranger(r, to.Addr()), to, []byte("?"))
}

// fragmentAt makes a fragment of a datagram, whose others are not sent.
func fragmentAt(index int) flood {
	return func(r *rand.Rand, to netip.AddrPort) packet.Packet {
		return packet.NewUDP(stranger(r, to.Addr()), to, make([]byte, 1400)).Fragments(1280, r.Uint32())[index]
	}
}

// forgedResets makes resets that have the addresses and ports of a connection, but a sequence
// number that no end accepts.
func (c *crowd) forgedResets(t *testing.T) flood {
	expected := map[netip.AddrPort]uint32{} // the next byte from a client
	flowtabletest.OpenIndex(t, c.tier.maps).Each(func(_ uint32, e *lbmap.FlowEntry) {
		if e.Word&lbmap.EntryReply != 0 {
			expected[lbmap.ToAddrPort(e.Dst, e.Dport)] = hostOrder(e.Acked)
		}
	})
	return func(r *rand.Rand, to netip.AddrPort) packet.Packet {
		for {
			v := c.open[r.IntN(len(c.open))]
			from := v.conn.LocalAddr()
			client, err := netip.ParseAddrPort(from.String())
			if err != nil || v.entry.network != "tcp" || v.entry.to.Addr().Is4() != to.Addr().Is4() {
				continue
			}
			p := packet.NewTCP(client, v.entry.to, packet.RST, nil)
			p.TCP.Seq = expected[client] + 1<<20 + r.Uint32N(1<<31)
			return p
		}
	}
}
