// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/packet"
)

// directState is what a path's tier was told for direct server return.
type directState struct {
	dispatch datapath.Dispatch
	sources  []netip.Prefix
	ready    map[netip.Addr]struct{}
	cluster  *proxier.Cluster // nil if it is not known
	// frontends have clients that get direct server return.
	frontends []datapath.Tuple
}

// model returns it as the model needs it.
func (d *directState) model() datapath.Direct {
	return datapath.Direct{
		Dispatch: d.dispatch, Sources: d.sources,
		Takes: func(backend netip.Addr) bool {
			_, is := d.ready[backend]
			return is
		},
		IsNode: func(a netip.Addr) bool { return d.cluster == nil || slices.Contains(d.cluster.Nodes, a) },
		IsOfCluster: func(a netip.Addr) bool {
			return d.cluster != nil && (slices.Contains(d.cluster.Nodes, a) || slices.ContainsFunc(d.cluster.Pods, func(p netip.Prefix) bool { return p.Contains(a) }))
		},
	}
}

// Senders of packets in packets, most of which are nodes; and where those packets go to.
var (
	wrapperSources = []string{"172.18.0.2", "172.18.0.3", "192.168.7.1", "198.51.100.2", "fd00:18::2", "fd00:18::3", "fd00:7::1", "2001:db8:51:100::2", "100.65.3.4", "fd00:65::3:4"}
	wrapperTargets = []string{"10.244.1.1", "10.244.1.1", "10.244.1.9", "10.244.1.9", "172.18.0.1", "10.244.2.1", "fd00:10:244:1::1", "fd00:10:244:1::1", "fd00:10:244:1::9", "fd00:18::1", "fd00:10:244:2::1"}
)

// directSources are not addresses of nodes.
var directSources = []netip.Prefix{netip.MustParsePrefix("100.65.0.0/16"), netip.MustParsePrefix("fd00:65::/64")}

// Clients outside the cluster, which alone get direct server return.
var (
	outsideSources     = []string{"198.51.100.1", "198.51.100.3", "198.51.100.4", "2001:db8:51:100::1", "2001:db8:51:100::3", "2001:db8:51:100::4"}
	outsideSourcePorts = []uint16{1000, 1001, 1002, 1003, 1004, 1005}
)

// setDirect gives the cluster random nodes, of whose endpoints some take packets of this node.
func (p *player) setDirect(r *rand.Rand) error {
	p.direct.ready = map[netip.Addr]struct{}{}
	for _, e := range randomEndpoints {
		for _, a := range []string{e.four, e.six} {
			if r.IntN(4) > 0 {
				p.direct.ready[netip.MustParseAddr(a)] = struct{}{}
			}
		}
	}
	p.tier.writer.SetDirect(p.direct.ready)
	c := proxier.Cluster{Pods: []netip.Prefix{netip.MustParsePrefix("198.51.100.2/32"), netip.MustParsePrefix("2001:db8:51:100::2/128")}}
	if r.IntN(4) > 0 {
		c.Pods = nil
	}
	for _, a := range wrapperSources[:8] {
		if r.IntN(4) > 0 {
			c.Nodes = append(c.Nodes, netip.MustParseAddr(a))
		}
	}
	p.direct.cluster = &c
	p.note("-- nodes %v, pods %v, ready %v", c.Nodes, c.Pods, p.direct.ready)
	return p.tier.SetCluster(c)
}

// pause makes the last packets of all flows earlier, in the programs and in the model.
func (p *path) pause(seconds uint32) {
	for i := range p.flows {
		if lbmap.FlowStage(p.flows[i].Life) >= lbmap.FlowYoung {
			p.age(uint32(i), seconds)
		}
	}
	p.model.Pause(time.Duration(seconds) * time.Second)
}

// noteFrontends notes for the traffic where clients get direct server return.
func (p *player) noteFrontends() {
	p.direct.frontends = []datapath.Tuple{}
	for _, c := range p.Table().All() {
		for i := range c.New.Frontends {
			f := &c.New.Frontends[i]
			if !f.Routes[proxier.FromOutside].Direct || f.Conflict != nil {
				continue
			}
			t := datapath.Tuple{Dst: f.Addr, Protocol: uint8(c.New.Name.Protocol)}
			if f.Kind == proxier.NodePort {
				node := p.at.Addr4
				if f.Addr.Addr().Is6() {
					node = p.at.Addr6
				}
				t.Dst = netip.AddrPortFrom(node, f.Addr.Port())
			}
			p.direct.frontends = append(p.direct.frontends, t)
		}
	}
}

// flowThat returns a flow of a kind; nil if there is none.
func (g traffic) flowThat(is func(*datapath.Flow) bool) *datapath.Flow {
	if len(g.flows) == 0 {
		return nil
	}
	at := g.IntN(len(g.flows))
	for _, f := range slices.Concat(g.flows[at:], g.flows[:at]) {
		if is(f) {
			return f
		}
	}
	return nil
}

func isDirect(f *datapath.Flow) bool { return f.Direct }

// isHere reports whether a flow is to a backend on this node.
func isHere(f *datapath.Flow) bool { return !f.Remote && !f.Direct && !f.Remapped }

// wrapping returns how another node sends the frames of a packet, in any form. A probe has the addresses of the packet around it.
func (g traffic) wrapping(p packet.Packet) func(frame []byte) []byte {
	four := p.IPv4 != nil
	from, to := pickAddr(g.Rand, wrapperSources, four), pickAddr(g.Rand, wrapperTargets, four)
	if p.ICMP != nil && g.one(2) {
		from, to = p.Source().Addr(), p.Destination().Addr()
	}
	backend, damaged := g.selected(p, to), g.one(10)
	send := func(b []byte) []byte {
		if b = (datapath.Opt{}).Send(b, backend); damaged {
			g.damageOption(b, four)
		}
		return b
	}
	if g.one(2) {
		d, sport := pick(g.Rand, datapath.Tunnels), uint16(g.Uint32())
		send = func(b []byte) []byte { return g.mark(d.Send(b, from, to, sport)) }
	}
	return func(frame []byte) []byte {
		if !isRunnable(frame) {
			return frame
		}
		b := slices.Concat(frame[:14], send(frame[14:]))
		if g.one(12) {
			b = g.damage(b)
		}
		return b
	}
}

// selected returns the backend that another node selects for a packet with an option: mostly that of the flow here, or of another one by
// the same source port.
func (g traffic) selected(p packet.Packet, other netip.Addr) netip.AddrPort {
	backend := netip.AddrPortFrom(other, uint16(pick(g.Rand, randomTargets)))
	if g.one(4) {
		return backend
	}
	for _, f := range g.flows {
		if f.Request.Src != p.Source() || f.Request.Protocol != p.Protocol() || !isHere(f) {
			continue
		}
		if backend = f.Reply.Src; f.Request.Dst == p.Destination() {
			break
		}
	}
	return backend
}

// mark sets the mark of congestion, as routers do, in half of the packets.
func (g traffic) mark(b []byte) []byte {
	switch {
	case g.one(2):
	case b[0]>>4 == 4:
		b[1] |= 3
		p := packet.ParseIP(b)
		p.IPv4.Checksum = nil
		b = p.Build()
	default:
		b[1] |= 3 << 4
	}
	return b
}

// damageOption changes a byte where options are.
func (g traffic) damageOption(b []byte, four bool) {
	at := 40 + g.IntN(24)
	if four {
		at = 20 + g.IntN(8)
	}
	if at < len(b) {
		b[at] ^= 1 << g.IntN(8)
	}
}

// outerError returns an ICMP error of a router about a packet that this node sent to a backend's node.
func (g traffic) outerError(f *datapath.Flow) (datapath.Hook, packet.Packet) {
	q := g.transport(f.Request, packet.ACK)
	g.dress(&q)
	quote := datapath.Opt{}.Send(q.Build(), f.Reply.Src)
	if d, is := pick(g.Rand, datapath.Dispatches).(datapath.Tunnel); is {
		quote = d.Send(q.Build(), f.Reply.Dst.Addr(), f.Reply.Src.Addr(), uint16(g.Uint32()))
	}
	quote = quote[:min(len(quote), 50+g.IntN(500))]
	four := f.Reply.Dst.Addr().Is4()
	message := pick(g.Rand, []uint16{packet.FragNeeded, packet.FragNeeded, packet.HostUnreachable, packet.NetUnreachable, packet.PortUnreachable, packet.TimeExceeded})
	if !four {
		message = pick(g.Rand, []uint16{packet.PacketTooBig6, packet.PacketTooBig6, packet.NoRoute6, packet.NoRoute6 | 3, packet.PortUnreachable6, packet.TimeExceeded6})
	}
	p := packet.NewProtocol(pickAddr(g.Rand, randomSources, four), f.Reply.Dst.Addr(), 0, quote)
	p.ICMP = &packet.ICMP{Type: uint8(message >> 8), Code: uint8(message), Rest: uint32(pick(g.Rand, []int{0, 20, 30, 60, 1280, 1400, 70000}))}
	return g.hook(datapath.In), p
}

// verifyResult is a strict receiver: a packet that was right, with all that is in it, has to be right after a program had it.
func verifyResult(frame []byte, got datapath.Result) error {
	if got.Verdict == shot || verifyAll(frame) != nil {
		return nil
	}
	if err := verifyAll(got.Frame); err != nil {
		return fmt.Errorf("%w in the result\n%s\n%x", err, packet.Parse(got.Frame), got.Frame[:min(len(got.Frame), 160)])
	}
	return nil
}

// verifyAll checks lengths and checksums of a frame, of the packet in its packet, and of the one that an ICMP error quotes.
func verifyAll(frame []byte) error {
	p := packet.Parse(frame)
	inner := innerPacket(&p)
	if err := p.Verify(); err != nil {
		return err
	}
	if inner != nil {
		q := packet.ParseIP(inner)
		if q.IPv4 == nil && q.IPv6 == nil {
			return errors.New("packet in a packet: no IP header")
		}
		if err := q.Verify(); err != nil {
			return fmt.Errorf("packet in a packet: %w", err)
		}
		if len(q.Trailer) > 0 {
			return fmt.Errorf("packet in a packet: %d bytes behind it", len(q.Trailer))
		}
	}
	if p.ICMP != nil && p.ICMP.Quoted != nil {
		q := packet.ParseIP(innerPacket(p.ICMP.Quoted))
		switch {
		case q.IPv4 == nil && q.IPv6 == nil:
		case q.TCP == nil && q.UDP == nil:
			return errors.New("the quote of a packet in a packet is truncated")
		default:
			return packet.NewError(p.Source().Addr(), uint16(p.ICMP.Type)<<8, 0, q).Verify()
		}
	}
	return nil
}

// innerPacket returns the packet that is in another one. Geneve needs no checksum, also over IPv6 (RFC 6936).
func innerPacket(p *packet.Packet) []byte {
	switch {
	case p.Protocol() == unix.IPPROTO_IPIP || p.Protocol() == unix.IPPROTO_IPV6:
		return p.Payload
	case p.UDP != nil && p.UDP.Dst == lbmap.GenevePort && len(p.Payload) > 8 && binary.BigEndian.Uint32(p.Payload[4:]) == lbmap.GeneveVni<<8:
		if sum := p.UDP.Checksum; sum != nil && *sum == 0 {
			p.UDP.Checksum = nil
		}
		return p.Payload[8:]
	}
	return nil
}

// newDirectPath is a path whose Services have direct server return unless they say otherwise. One has it all the time: without any,
// frontends take packets of other nodes for another 30 seconds.
func newDirectPath(t *testing.T, dispatch datapath.Dispatch, opts Options, open func(testing.TB, Options) *path) *path {
	t.Helper()
	opts.Dispatch = dispatches[fmt.Sprint(dispatch)]
	opts.Sizes = pathSizes
	opts.Sizes.TCPFlows, opts.Sizes.UDPFlows = 24, 8
	opts.Sizes.YoungFlows = 16 // no fewer than stay when one is added
	p := open(t, opts)
	p.direct.dispatch, p.direct.sources = dispatch, opts.DirectSources
	policy := pathPolicy(p.at)
	policy.Forwarding = proxier.DSR
	p.UpdatePolicy(policy, func(*proxier.Facts) {})
	p.OnServiceAdd(writertest.Service("direct", "10.96.0.7"))
	return p
}

// TestPacketsDirect is TestPackets with direct server return: this node sends clients' packets to other nodes, and takes what they send,
// in any form.
func TestPacketsDirect(t *testing.T) {
	for _, d := range datapath.Dispatches {
		t.Run(fmt.Sprint(d), func(t *testing.T) {
			compareRandomly(t, newDirectPath(t, d, Options{}, newPath), kernel.Rounds(*packetCount/8))
		})
	}
	t.Run("ipip from prefixes", func(t *testing.T) {
		compareRandomly(t, newDirectPath(t, datapath.IPIP{}, Options{DirectSources: directSources}, newPath), kernel.Rounds(*packetCount/8))
	})
}
