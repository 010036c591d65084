// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	ebpfdatapath "github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable/flowtabletest"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// The node whose packet programs these tests run, and its neighbourhood:
//
//	172.18.0.1     fd00:18::1            node1, the tested node: serves NodePorts at this address
//	192.168.7.1    fd00:7::1             another address of node1, without NodePorts
//	10.96.0.250    fd00:10:96::250       an address of node1 in the range of ClusterIPs
//	10.244.1.1     fd00:10:244:1::1      pod of node1
//	10.244.1.0/24  fd00:10:244:1::/64    pods of node1 that do not exist
//	10.244.2.0/24  fd00:10:244:2::/64    pods of node2, through the uplink
//	198.51.100.0/24 2001:db8:51:100::/64 clients, through the uplink, as all other addresses
var (
	other4 = netip.MustParseAddr("192.168.7.1")
	other6 = netip.MustParseAddr("fd00:7::1")
	inner4 = netip.MustParseAddr("10.96.0.250")
	inner6 = netip.MustParseAddr("fd00:10:96::250")
)

const (
	// node2MTU is the MTU of node2's link.
	node2MTU   = 1400
	largestOut = 1 << 12
)

// nodePortRange is excluded from source ports.
var nodePortRange = ebpfdatapath.PortRange{First: 30000, Last: 32767}

// pathSizes have space for few flows, so that young ones evict each other, and new ones are refused.
var pathSizes = lbmap.Sizes{
	Frontends: 1 << 10, Services: 1 << 8, Backends: 1 << 10, Slots: 1 << 11, Affinity: 1 << 12, UDPPeers: 1 << 4, OptOuts: 16,
	TCPFlows: 12, UDPFlows: 3, YoungFlows: 8,
}

// pathFacts returns the facts of the node.
func pathFacts(at *lab.Node) proxier.Facts {
	locals := []netip.Addr{at.Addr4, at.Addr6, other4, other6, inner4, inner6}
	slices.SortFunc(locals, netip.Addr.Compare)
	return proxier.Facts{
		NodeIPs: [proxier.Families]netip.Addr{at.Addr4, at.Addr6}, LocalAddrs: locals,
		Pods:         proxier.Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}},
		ServiceCIDRs: []netip.Prefix{lab.ServicePrefix4, lab.ServicePrefix6},
	}
}

// pathPolicy serves NodePorts only at the node's primary addresses.
func pathPolicy(at *lab.Node) proxier.Policy {
	return proxier.Policy{NodePorts: proxier.NodePortSelector{Primary: true}}
}

// path is a node whose packet programs run on one packet at a time, as if it had arrived through
// the node's uplink, or were about to leave through it.
type path struct {
	*proxier.Proxier
	lab      *lab.Lab
	at       *lab.Node
	node2    *lab.Node
	pod      *lab.Pod
	tier     *Tier
	maps     lbmap.Maps
	programs *ebpfdatapath.PacketPrograms
	xdp      *accelerated // nil for none
	variant  ebpfdatapath.Variant
	uplink   int // its index
	device   int // index of the device that packets pass
	mac      packet.MAC
	routes   map[netip.Addr]datapath.Route // MTU is 0 if there is none
	context  []byte
	out      []byte
	direct   directState
	flows    []lbmap.Flow // the programs' records
	counters []lbmap.FlowCounter
	index    *flowtable.Index
	entries  *flowtabletest.Index
	model    *datapath.Model
	counted  map[string]uint64 // by reason, at the last reset
}

// newPodPath is a path whose packets pass the device of the node's pod.
func newPodPath(t testing.TB, opts Options, fromPod bool) *path {
	t.Helper()
	p := newPath(t, opts)
	p.variant = ebpfdatapath.Variant{Role: lbmap.RolePod, FromPod: fromPod}
	var err error
	if p.programs, err = p.tier.devices.Programs(t.Context(), p.variant); err != nil {
		t.Fatal(err)
	}
	p.use(t, p.pod.HostLink)
	p.rename(t, []byte{2, 0, 0, 0, 0, 3})
	p.use(t, p.pod.HostLink)
	if err := p.reset(); err != nil {
		t.Fatal(err)
	}
	return p
}

// newPath opens the tier on a node. Options that are zero get the defaults of these tests.
func newPath(t testing.TB, opts Options) *path {
	t.Helper()
	l := lab.NewT(t)
	p := &path{lab: l, at: l.Node("node1"), node2: l.Node("node2"), out: make([]byte, largestOut), routes: map[netip.Addr]datapath.Route{}}
	if err := p.node2.SetMTU(node2MTU); err != nil {
		t.Fatal(err)
	}
	p.pod = p.at.Pod("pod")
	if opts.Sizes == (lbmap.Sizes{}) {
		opts.Sizes = pathSizes
	}
	if opts.NodePortRange == (ebpfdatapath.PortRange{}) {
		opts.NodePortRange = nodePortRange
	}
	tier, err := openOn(t, p.at, opts)
	if err != nil {
		t.Fatal(err)
	}
	p.tier, p.maps = tier, tier.maps
	t.Cleanup(func() {
		tier.Close()
		if err := cleanupOn(p.at); err != nil {
			t.Error(err)
		}
	})
	if p.programs, err = tier.devices.Programs(t.Context(), ebpfdatapath.Variant{}); err != nil {
		t.Fatal(err)
	}
	if p.Proxier, err = proxier.New(proxier.Options{
		NodeName: p.at.Name, Tier: tier, Runner: proxier.DefaultRunnerOptions(), Facts: pathFacts(p.at), Policy: pathPolicy(p.at),
	}); err != nil {
		t.Fatal(err)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	if err := p.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := tier.SetUplinks(t.Context(), uplinksOf(t, p.at)); err != nil {
		t.Fatal(err)
	}
	// With a fixed MAC address, frames in failure reports can be replayed.
	p.use(t, lab.Uplink)
	p.rename(t, []byte{2, 0, 0, 0, 0, 2})
	p.use(t, lab.Uplink)
	p.uplink = p.device
	memory := []byte{}
	if p.flows, memory, err = lbmap.Memory[lbmap.Flow](p.maps["tdm_flow"]); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(memory) })
	counters := []byte{}
	if p.counters, counters, err = lbmap.Memory[lbmap.FlowCounter](p.maps["tdm_flow_count"]); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(counters) })
	if p.index, err = flowtable.OpenIndex(p.maps); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.index.Close)
	p.entries = flowtabletest.OpenIndex(t, p.maps)
	if err := p.reset(); err != nil {
		t.Fatal(err)
	}
	return p
}

// use makes packets pass another device.
func (p *path) use(t testing.TB, device string) {
	t.Helper()
	link, err := p.at.Netlink().LinkByName(device)
	if err != nil {
		t.Fatal(err)
	}
	p.device, p.mac = link.Attrs().Index, packet.MAC{}
	copy(p.mac[:], link.Attrs().HardwareAddr) // lo has none
	p.context = make([]byte, sizeofSkBuff)
	binary.NativeEndian.PutUint32(p.context[skbIfindex:], uint32(p.device))
}

// rename gives the device another MAC address.
func (p *path) rename(t testing.TB, mac []byte) {
	t.Helper()
	link, err := p.at.Netlink().LinkByIndex(p.device)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.at.Netlink().LinkSetHardwareAddr(link, net.HardwareAddr(mac)); err != nil {
		t.Fatal(err)
	}
}

// Offsets in struct __sk_buff of linux/bpf.h.
const (
	sizeofSkBuff = 192
	skbIfindex   = 40
	skbGSOSegs   = 164
	skbGSOSize   = 176
)

// run runs a program on a frame. Call it only on a thread of the node.
func (p *path) run(h datapath.Hook, frame []byte) (datapath.Result, error) {
	if p.xdp != nil && h == in {
		return p.runAccelerated(frame)
	}
	return p.runTC(h, frame)
}

// runTC runs a program of tc on a frame.
func (p *path) runTC(h datapath.Hook, frame []byte) (datapath.Result, error) {
	opts := ciliumebpf.RunOptions{Data: frame, DataOut: p.out[:largestOut], Context: p.context}
	verdict, err := p.programs[h].Run(&opts)
	if err != nil {
		return datapath.Result{}, fmt.Errorf("run program %s on %x: %w", ebpfdatapath.PacketHooks[h].Program, frame, err)
	}
	return datapath.Result{Verdict: int32(verdict), Frame: opts.DataOut}, nil
}

// ask runs a program on a packet. It may be called from any goroutine.
func (p *path) ask(h datapath.Hook, q packet.Packet) (r datapath.Result, err error) {
	err = p.at.Do(func() (err error) { r, err = p.run(h, p.frame(q)); return err })
	return r, err
}

// reset removes all flows, and all other state that packets left.
func (p *path) reset() error {
	var timeouts flowtable.Timeouts
	if _, err := p.tier.flowTable.Sweep(context.Background(), &timeouts, flowtable.MonotonicSeconds()+math.MaxInt32/2); err != nil {
		return err
	}
	if n := p.tier.flowTable.Used(); n != 0 {
		return fmt.Errorf("%d flows cannot be ended", n)
	}
	for _, name := range []string{"tdm_fragment", "tdm_affinity", "tdm_snat"} {
		if m := p.maps[name]; m != nil {
			if err := lbmap.DeleteAll(m); err != nil {
				return err
			}
		}
	}
	p.counters[lbmap.FlowSeed].Options = 0
	cpus := make([]uint64, ciliumebpf.MustPossibleCPU())
	if err := p.maps["tdm_budget"].Put(uint32(0), cpus); err != nil {
		return err
	}
	p.model = datapath.New(p.node(), p.replyOf)
	p.model.Decide(p.Table().All(), p.Table().NodeRules())
	if p.xdp != nil {
		p.xdp.taken = 0
	}
	var err error
	p.counted, err = p.reasons()
	return err
}

// node returns the node as the model needs it.
func (p *path) node() datapath.Node {
	s := p.tier.opts.Sizes
	return datapath.Node{
		L2: 14, MAC: p.mac, Route: p.route, Pod: p.variant.Role == lbmap.RolePod, FromPod: p.variant.FromPod,
		KeptTCP: int(s.TCPFlows), KeptUDP: int(s.UDPFlows), Young: int(flowtable.PowerOfTwo(s.YoungFlows)), Over: lbmap.MaxClosed,
		SourcePort: func(port uint16) bool {
			return port >= 1024 && !p.tier.opts.NodePortRange.Overlaps(ebpfdatapath.PortRange{First: port, Last: port})
		},
		Seen: func(request datapath.Tuple) uint32 {
			if f := p.flowOf(request); f != nil {
				return f.Seen
			}
			return 0
		},
		Direct: p.direct.model(),
	}
}

// route returns the kernel's route. Results are cached, because a lookup costs more than a packet.
func (p *path) route(to netip.Addr) (datapath.Route, bool) {
	if r, known := p.routes[to]; known {
		return r, r.MTU > 0
	}
	var r datapath.Route
	found, err := p.at.Netlink().RouteGet(to.AsSlice())
	if err == nil && found[0].Type == unix.RTN_UNICAST {
		source, _ := netip.AddrFromSlice(found[0].Src)
		r = datapath.Route{Uplink: found[0].LinkIndex == p.uplink, Source: source.Unmap(), MTU: cmp.Or(found[0].MTU, 1500)}
	}
	p.routes[to] = r
	return r, r.MTU > 0
}

// setRoute adds or deletes a route to an address by way of node2.
func (p *path) setRoute(to netip.Addr, there bool) error {
	clear(p.routes)
	gateway := p.node2.Addr4
	if to.Is6() {
		gateway = p.node2.Addr6
	}
	route := &netlink.Route{Dst: &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(to.BitLen(), to.BitLen())}, Gw: gateway.AsSlice(), LinkIndex: p.uplink}
	change := p.at.Netlink().RouteDel
	if there {
		change = p.at.Netlink().RouteAdd
	}
	return errors.Join(change(route), nextTick())
}

// nextTick waits until the kernel's clock ticks. Until then, programs use the routes that they looked up.
func nextTick() error {
	var before, now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &before); err != nil {
		return err
	}
	for now = before; now == before; {
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now); err != nil {
			return err
		}
	}
	return nil
}

// replyOf returns the reply tuple of the programs' flow for a request.
func (p *path) replyOf(request datapath.Tuple) (reply datapath.Tuple, ok bool) {
	f := p.flowOf(request)
	if f == nil {
		return reply, false
	}
	return tupleOf(f.Reply), true
}

// flowOf returns the programs' flow for a request; nil for none.
func (p *path) flowOf(request datapath.Tuple) *lbmap.Flow {
	key := lbmap.FlowKey{
		Src: lbmap.FromAddr(request.Src.Addr()), Dst: lbmap.FromAddr(request.Dst.Addr()),
		Sport: lbmap.NetworkPort(request.Src.Port()), Dport: lbmap.NetworkPort(request.Dst.Port()), Proto: request.Protocol,
	}
	e := p.index.Find(&key)
	if e == nil {
		return nil
	}
	f := &p.flows[e.Id]
	if lbmap.FlowStage(f.Life) < lbmap.FlowYoung || uint32(f.Life>>32) != e.Generation || f.Request != key {
		return nil
	}
	return f
}

func tupleOf(k lbmap.FlowKey) datapath.Tuple {
	return datapath.Tuple{Src: lbmap.ToAddrPort(k.Src, k.Sport), Dst: lbmap.ToAddrPort(k.Dst, k.Dport), Protocol: k.Proto}
}

// ways is how many entries a flow has: of direct server return, none for replies.
func ways(f *lbmap.Flow) int {
	if f.Action == uint8(lbmap.ActionDirect) {
		return 1
	}
	return 2
}

// dump returns the programs' flows in the format of the model.
func (p *path) dump() (list []string) {
	for i := range p.flows {
		f := &p.flows[i]
		if lbmap.FlowStage(f.Life) < lbmap.FlowYoung {
			continue
		}
		m := datapath.Flow{
			Request: tupleOf(f.Request), Reply: tupleOf(f.Reply), Remote: f.Action == uint8(lbmap.ActionSNAT), Direct: f.Action == uint8(lbmap.ActionDirect),
			Remapped: f.Action == uint8(lbmap.ActionRemapOut) || f.Action == uint8(lbmap.ActionRemapIn), Kept: lbmap.FlowStage(f.Life) == lbmap.FlowKept,
		}
		for way, place := range f.Place[:ways(f)] {
			e := &p.entries.List[place]
			m.Packets[way], m.Bytes[way] = e.Packets, e.Bytes
		}
		for at, state := range map[uint32]datapath.State{
			lbmap.FlowReplied: datapath.Replied, lbmap.FlowFINRequest: datapath.FinRequest, lbmap.FlowFINReply: datapath.FinReply,
			lbmap.FlowClosed: datapath.Closed, lbmap.FlowEstablished: datapath.Established,
		} {
			if uint32(f.Flags)&at != 0 {
				m.State |= state
			}
		}
		list = append(list, m.String())
	}
	slices.Sort(list)
	return list
}

// checkFlows compares the programs' flows with those of the model.
func (p *path) checkFlows() error {
	var want []string
	for _, f := range p.model.Flows() {
		want = append(want, f.String())
	}
	slices.Sort(want)
	if got := p.dump(); !slices.Equal(got, want) {
		return fmt.Errorf("flows\n%s\nthe model has\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	return nil
}

// age makes the last packet of a flow earlier.
func (p *path) age(id, seconds uint32) {
	f := &p.flows[id]
	f.Seen -= seconds
	for _, place := range f.Place {
		if e := &p.entries.List[place]; e.Id == id {
			e.Seen = f.Seen
		}
	}
}

// checkKeys checks that each flow has its two entries, and that there are no others.
func (p *path) checkKeys() error { return checkEntries(p.index, p.entries, p.flows) }

// checkEntries checks that each flow has its two entries, which can be found and show its flags,
// and that there are no others.
func checkEntries(index *flowtable.Index, all *flowtabletest.Index, flows []lbmap.Flow) error {
	entries := map[uint32]*lbmap.FlowEntry{}
	all.Each(func(place uint32, e *lbmap.FlowEntry) { entries[place] = e })
	for i := range flows {
		f := &flows[i]
		if lbmap.FlowStage(f.Life) == lbmap.FlowFree {
			continue
		}
		for way, key := range []lbmap.FlowKey{f.Request, f.Reply}[:ways(f)] {
			e := entries[f.Place[way]]
			if found := index.Find(&key); e == nil || found == nil || *found != *e || e.Id != uint32(i) || e.Generation != uint32(f.Life>>32) {
				return fmt.Errorf("the key %v of flow %d has entry %+v", tupleOf(key), i, e)
			}
			const indexed = lbmap.FlowIndexed
			if shown, has := uint32(e.Word)>>8, uint32(f.Flags); shown|indexed != has|indexed || e.Word>>2&1 != uint64(way) {
				return fmt.Errorf("the entry of key %v shows flags %#x, way %d; its flow has %#x", tupleOf(key), shown, e.Word>>2&1, has)
			}
			if o := tupleOf([2]lbmap.FlowKey{f.Reply, f.Request}[way]); o.Src != lbmap.ToAddrPort(e.Dst, e.Dport) || o.Dst != lbmap.ToAddrPort(e.Src, e.Sport) {
				return fmt.Errorf("the entry of key %v translates to %v", tupleOf(key), e)
			}
			delete(entries, f.Place[way])
		}
	}
	if err := all.CheckFilter(); err != nil {
		return err
	}
	for place, e := range entries {
		return fmt.Errorf("the entry %+v at %d is of no flow", e, place)
	}
	return nil
}

// reasonNames are the names of enum reason, in its order.
var reasonNames = func() (names []string) {
	header, err := os.ReadFile("../../bpf/reason.h")
	if err != nil {
		panic(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^\t([A-Z_]+),`).FindAllSubmatch(header, -1) {
		names = append(names, string(m[1]))
	}
	return slices.Clip(names[:len(names)-1]) // the last one is the number of reasons
}()

// reasons returns the packet counters by reason.
func (p *path) reasons() (map[string]uint64, error) {
	list := map[string]uint64{}
	for i, name := range reasonNames {
		var cpus []uint64
		if err := p.maps["tdm_reason"].Lookup(uint32(i), &cpus); err != nil {
			return nil, err
		}
		for _, n := range cpus {
			list[name] += n
		}
	}
	return list, nil
}

// counts returns the packets by reason since the last reset.
func (p *path) counts() (map[string]uint64, error) {
	list, err := p.reasons()
	for name, n := range list {
		if list[name] = n - p.counted[name]; list[name] == 0 {
			delete(list, name)
		}
	}
	// Counted in addition, so the model does not know it.
	if x := p.xdp; x != nil && err == nil {
		if list["ACCELERATED"] != x.taken {
			err = disagreement{fmt.Errorf("%d packets were counted as taken by XDP, which took %d", list["ACCELERATED"], x.taken)}
		}
		delete(list, "ACCELERATED")
	}
	return list, err
}

// sync applies the recorded changes to the programs and to the model.
func (p *path) sync() error {
	if err := p.Sync(context.Background()); err != nil {
		return err
	}
	p.model.Decide(p.Table().All(), p.Table().NodeRules())
	return nil
}

// expire ends idle flows as after this time of silence, in the programs and in the model.
func (p *path) expire(silent time.Duration) error {
	timeouts := flowtable.DefaultTimeouts()
	now := flowtable.MonotonicSeconds() + uint32(silent/time.Second)
	if _, err := p.tier.flowTable.Sweep(context.Background(), &timeouts, now); err != nil {
		return err
	}
	p.model.Expire(now, func(protocol uint8, s datapath.State) time.Duration {
		switch {
		case protocol == packet.ProtoUDP && s&datapath.Replied != 0:
			return timeouts.UDPStream
		case protocol == packet.ProtoUDP:
			return timeouts.UDP
		case s&datapath.Closed != 0:
			return timeouts.Closed
		case s&(datapath.FinRequest|datapath.FinReply) != 0:
			return timeouts.CloseWait
		case s&datapath.Established != 0:
			return timeouts.Established
		}
		return timeouts.Opening
	})
	return nil
}

// resolve gives the kernel the link-layer addresses of all neighbours. Without them, the programs'
// route lookups report only that there is no neighbour yet, and the programs keep no route.
func (p *path) resolve() error {
	link, err := p.at.Netlink().LinkByName(p.pod.HostLink)
	if err != nil {
		return err
	}
	fabric := p.lab.Fabric()
	for _, n := range []struct {
		device int
		addr   netip.Addr
	}{
		{p.uplink, p.node2.Addr4}, {p.uplink, p.node2.Addr6}, {p.uplink, fabric.Addr4}, {p.uplink, fabric.Addr6},
		{link.Attrs().Index, p.pod.Addr4}, {link.Attrs().Index, p.pod.Addr6},
	} {
		err := p.at.Netlink().NeighSet(&netlink.Neigh{
			LinkIndex: n.device, State: netlink.NUD_PERMANENT, IP: n.addr.AsSlice(), HardwareAddr: []byte{2, 0, 0, 0, 0, 1},
		})
		if err != nil {
			return err
		}
	}
	return nil
}
