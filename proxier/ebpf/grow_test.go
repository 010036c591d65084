// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sizing"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// problemList keeps what is reported.
type problemList struct {
	mu  sync.Mutex
	all []proxier.Problem
}

func (p *problemList) Report(problem proxier.Problem) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = append(p.all, problem)
}

func (p *problemList) capacity() (found []proxier.Problem) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, problem := range p.all {
		if problem.Reason == proxier.ReasonCapacity {
			found = append(found, problem)
		}
	}
	return found
}

// smallStart are sizes that a few Services and connections outgrow, and what they may become.
func smallStart() (start, most lbmap.Sizes) {
	most = lbmap.Sizes{Frontends: 1 << 12, Services: 1 << 11, Backends: 1 << 12, Slots: 1 << 13, Affinity: 1 << 12, UDPPeers: 1 << 10,
		TCPFlows: 1 << 12, UDPFlows: 1 << 12, YoungFlows: 1 << 13}.WithDefaults()
	start = sizing.Flows(most, most, sizing.Levels(most)-1)
	start.Frontends, start.Services, start.Backends, start.Slots, start.Affinity, start.UDPPeers = 64, 32, 64, 64, 1<<10, 1<<9
	return start, most
}

// fleet adds Services to a node, each with two endpoints.
func fleet(n *node, first, count int) {
	for i := first; i < first+count; i++ {
		name := fmt.Sprintf("fleet-%d", i)
		n.OnServiceAdd(writertest.Service(name, fmt.Sprintf("10.96.%d.%d", 100+i/200, 1+i%200)))
		n.OnEndpointSliceAdd(writertest.Slice(name, name, fmt.Sprintf("10.244.9.%d", 1+i%250), fmt.Sprintf("10.244.8.%d", 1+i%250)))
	}
}

// TestGrowth: maps grow under traffic of clients outside and of sockets. No connection breaks and no new one fails, counters and
// affinities stay, and source ranges are checked all the time.
func TestGrowth(t *testing.T) {
	start, most := smallStart()
	problems := &problemList{}
	e := newEdge(t, Options{Sizes: most, Start: start, Reporter: problems}, lab.Options{Nodes: live.Guarded})
	go e.tier.Run(t.Context())
	pods := []*lab.Pod{serve(t, e.here), serve(t, e.there)}
	e.use(t, pods...)
	// A Service with affinity, and one that a pod is not let in to.
	sticky, closed := netip.MustParseAddr("10.96.0.77"), netip.MustParseAddr("10.96.0.78")
	guarded := netip.MustParseAddr("203.0.113.78")
	for name, s := range map[string]*v1.Service{
		"sticky": writertest.Service("sticky", sticky.String(), func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP }),
		"closed": writertest.Service("closed", closed.String(), func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: guarded.String()}}
		}),
	} {
		e.OnServiceAdd(s)
		e.OnEndpointSliceAdd(writertest.Slice(name, name, e.here.Addr4.String(), e.there.Addr4.String()))
	}
	e.sync(t)
	server := func() string {
		r, err := e.here.Ask(shortly(t), "tcp", netip.AddrPortFrom(sticky, 80))
		if err != nil {
			t.Fatalf("Service with affinity: %v", err)
		}
		return r.Server
	}
	favourite := server()
	checkClosed := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if r, err := e.here.Ask(ctx, "tcp", netip.AddrPortFrom(guarded, 80)); err == nil {
			t.Errorf("a client outside the source ranges got a reply of %s", r.Server)
		}
	}
	checkClosed()
	load := newLoad(t, e, 4)
	var asked, failed int
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var sockets sync.WaitGroup
	sockets.Go(func() {
		for ctx.Err() == nil {
			for _, network := range []string{"tcp", "udp"} {
				asked++
				if _, err := e.here.Ask(context.Background(), network, netip.AddrPortFrom(vip4, 80)); err != nil {
					failed++
					t.Errorf("a pod's %s connection: %v", network, err)
				}
			}
		}
	})

	grew := func(what string, was lbmap.Sizes, larger func(s lbmap.Sizes) uint32) {
		t.Helper()
		load.allAnswered(t, what)
		if now := sizesOf(e.tier); larger(now) <= larger(was) {
			t.Errorf("%s: the maps did not grow: %+v", what, now)
		}
		if full := e.tier.Unplaced(); len(full) > 0 {
			t.Errorf("%s: %d service ports do not fit", what, len(full))
		}
		if got := server(); got != favourite {
			t.Errorf("%s: the client with affinity to %s reached %s", what, favourite, got)
		}
		checkClosed()
		checkGeneration(t, e.tier)
	}
	was := sizesOf(e.tier)
	for _, services := range []int{60, 500} {
		first := len(e.fleetNames())
		fleet(e.node, first, services)
		e.sync(t)
		grew(fmt.Sprintf("%d more Services", services), was, func(s lbmap.Sizes) uint32 { return s.Services })
		was = sizesOf(e.tier)
	}
	if counted := connectionsTo(t, e.tier, "web"); counted == 0 {
		t.Error("the counters of connections were lost")
	}

	// Flows grow once a quarter of the established connections are there.
	func() {
		for _, use := range copyingFlows(e.tier) {
			load.rests[use].Lock()
			defer load.rests[use].Unlock()
		}
		before := sizesOf(e.tier)
		open := openMany(t, e, int(before.TCPFlows/4))
		for deadline := time.Now().Add(20 * time.Second); sizesOf(e.tier).TCPFlows == before.TCPFlows && time.Now().Before(deadline); {
			lull(t.Context())
		}
		grew("more connections", before, func(s lbmap.Sizes) uint32 { return s.TCPFlows })
		for _, c := range open {
			if _, err := lab.AskConn(shortly(t), c); err != nil {
				t.Fatalf("an open connection after the flows grew: %v", err)
			}
			c.Close()
		}
	}()
	stop()
	sockets.Wait()
	load.stop()
	n := load.counts()
	t.Logf("%d requests over open connections, %d over new ones, %d of pods", n.open, n.fresh, asked)
	if n.broken > 0 || n.failed > 0 || failed > 0 {
		counts, err := e.tier.Packets()
		t.Errorf("%d connections broke, %d new ones failed, and %d of pods; packets: %v (%v)", n.broken, n.failed, failed, counts, err)
	}
	if full := problems.capacity(); len(full) > 0 {
		t.Errorf("reported although it fits: %+v", full)
	}
}

// TestYoungFlowsGrow: maps of flows grow when many connections begin, also if none of them is established.
func TestYoungFlowsGrow(t *testing.T) {
	start, most := smallStart()
	start.Affinity = most.Affinity // some Services have it
	p := newPath(t, Options{Sizes: most, Start: start})
	p.endsCluster(t)
	e := endsOf(proxier.IPv4)
	births, began := &p.tier.growth.births, time.Now()
	births.look(p.tier.flowTable, began)
	begin := func(first, count int) {
		for i := first; i < first+count; i++ {
			p.send(t, in, tcp(netip.AddrPortFrom(e.client.Addr(), uint16(2000+i)), e.local, packet.SYN))
		}
	}
	begin(0, int(start.YoungFlows/2))
	births.look(p.tier.flowTable, began.Add(time.Second))
	p.tier.growAsNeeded(t.Context())
	if p.tier.sizes != start {
		t.Errorf("the maps grew with %d new flows a second: %+v", start.YoungFlows/2, p.tier.sizes)
	}
	begin(2000, int(start.YoungFlows/2)+10)
	births.look(p.tier.flowTable, began.Add(2*time.Second))
	p.tier.growAsNeeded(t.Context())
	if p.tier.sizes.YoungFlows != 4*start.YoungFlows {
		t.Errorf("the maps have room for %d young flows, want %d", p.tier.sizes.YoungFlows, 4*start.YoungFlows)
	}
}

// TestGrowthInterrupted: a process that dies while it replaces programs leaves some with the larger maps and some with the
// earlier ones. The next one goes on with the larger maps, and no connection breaks.
func TestGrowthInterrupted(t *testing.T) {
	start, most := smallStart()
	opts := Options{Sizes: most, Start: start}
	e := newEdge(t, opts, lab.Options{Nodes: live.Guarded})
	pods := []*lab.Pod{serve(t, e.here), serve(t, e.there)}
	e.use(t, pods...)
	open := openMany(t, e, 40)
	larger := sizing.Flows(e.tier.sizes, most, 0)
	larger.Services, larger.Backends = 2*larger.Services, 2*larger.Backends
	next, err := e.tier.larger(t.Context(), larger)
	if err != nil {
		t.Fatal(err)
	}
	died := errors.New("the process dies")
	var replaced error
	err = e.tier.writer.Move(func(tables *lbmap.Tables) (*lbmap.Tables, error) {
		into, err := lbmap.OpenTables(next.maps)
		if err != nil {
			return nil, err
		}
		defer into.Unmap()
		if _, err := lbmap.CopyTables(e.tier.maps, next.maps, tables, into); err != nil {
			return nil, err
		}
		replaced = e.tier.replaceHooks(next.hooks, e.tier.hooks)
		return nil, died
	})
	if !errors.Is(err, died) || replaced != nil {
		t.Fatal(err, replaced)
	}
	next.close()
	e.close()
	e.begin(t, opts, nil)
	if !e.tier.Adopted() || e.tier.sizes != larger {
		t.Errorf("adopted: %v, %+v, want %+v", e.tier.Adopted(), e.tier.sizes, larger)
	}
	e.use(t, pods...)
	checkGeneration(t, e.tier)
	for _, c := range open {
		if _, err := lab.AskConn(shortly(t), c); err != nil {
			t.Fatalf("an open connection: %v", err)
		}
	}
	if _, err := e.here.Ask(shortly(t), "tcp", netip.AddrPortFrom(vip4, 80)); err != nil {
		t.Error(err)
	}
}

// openMany opens that many TCP connections to NodePorts.
func openMany(t *testing.T, e *edge, count int) (open []net.Conn) {
	t.Helper()
	entries := e.entries("tcp")
	for i := range count {
		c, err := e.client.Dial(shortly(t), "tcp", entries[i%len(entries)].to)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := lab.AskConn(shortly(t), c); err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	return open
}

// fleetNames are the Services of fleet that are there.
func (n *node) fleetNames() (names []string) {
	for id := range tablesOf(n.tier).Services {
		s := &tablesOf(n.tier).Services[id]
		if _, name, _ := s.SplitName(); s.State != lbmap.ServiceFree && len(name) > 5 && name[:6] == "fleet-" {
			names = append(names, name)
		}
	}
	return names
}

func connectionsTo(t *testing.T, tier *Tier, service string) (sum uint64) {
	t.Helper()
	list, err := tier.Traffic()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		if s.Name == service {
			sum += s.Node.Connections + s.Outside.Connections
		}
	}
	return sum
}

// checkGeneration checks that all programs that are attached use the maps of the tier, and that these have the sizes that they
// should have.
func checkGeneration(t *testing.T, tier *Tier) {
	t.Helper()
	if err := tier.audit(t.Context()); err != nil {
		t.Fatal(err)
	}
	tier.gen.RLock()
	defer tier.gen.RUnlock()
	want := map[string]ciliumebpf.MapID{}
	for name, m := range tier.maps {
		want[name] = mapID(t, m)
	}
	check := func(program *ciliumebpf.Program) {
		t.Helper()
		maps, err := lbmap.MapsOf(program)
		if err != nil {
			t.Fatal(err)
		}
		defer maps.Close()
		for name, m := range maps {
			if id := want[name]; id != 0 && id != mapID(t, m) {
				t.Errorf("%s uses another map %s than user space", program, name)
			}
		}
	}
	found, err := datapath.FindAttached(tier.cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer datapath.CloseAttached(found)
	for _, a := range found {
		check(a.Program)
	}
	if err := tier.netns.Do(func() error {
		for device := range tier.devices.Served {
			for _, h := range datapath.PacketHooks {
				there, err := tc.Find(device, h.Direction, datapath.IsOwnProgram)
				if err != nil {
					return err
				}
				if len(there) != 1 {
					t.Errorf("%d programs %s on device %d", len(there), h.Program, device)
				}
				for _, a := range there {
					check(a.Program)
				}
				tc.Close(there)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	sizes := lbmap.SizesOf(tier.maps)
	for i, size := range sizes.All() {
		if got := *tier.sizes.All()[i].At; *size.At != 0 && got != *size.At {
			t.Errorf("map of %s: %d entries, want %d", size.Name, *size.At, got)
		}
	}
}

func sizesOf(tier *Tier) lbmap.Sizes {
	tier.gen.RLock()
	defer tier.gen.RUnlock()
	return tier.sizes
}

func mapID(t *testing.T, m *ciliumebpf.Map) ciliumebpf.MapID {
	t.Helper()
	info, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return id
}

// TestMapMemory compares the estimate with what the kernel says. Before Linux 6.4 (map_mem_usage), that is an estimate too, which has
// all entries of maps that take memory as they are used.
func TestMapMemory(t *testing.T) {
	l := lab.NewT(t)
	most := lbmap.DefaultSizes()
	for name, sizes := range map[string]lbmap.Sizes{"at most": most, "at the start": sizing.Start(most, 24<<20, 2, sizing.Memory), "on a small node": sizing.Start(most, 4<<20, 2, sizing.Memory)} {
		n := newNode(t, l.Node("node-"+strings.ReplaceAll(name, " ", "-")), l, Options{Sizes: most, Start: sizes})
		var sum uint64
		for _, m := range n.tier.maps {
			info, err := m.Info()
			if err != nil {
				t.Fatal(err)
			}
			bytes, _ := info.Memlock() // none of maps that are empty
			sum += bytes
		}
		estimate := sizing.Memory(sizes)
		t.Logf("%s: %.1f MiB, estimated %.1f MiB", name, float64(sum)/(1<<20), float64(estimate)/(1<<20))
		if sum < estimate/2 || kernel.AtLeast(t, 6, 4) && sum > estimate+estimate/8 {
			t.Errorf("%s: %d bytes, estimated %d", name, sum, estimate)
		}
	}
}

// TestGrowthStops: what cannot grow is reported, and the other Services are served.
func TestGrowthStops(t *testing.T) {
	start, most := smallStart()
	problems := &problemList{}
	at := lab.NewT(t)
	n := newNode(t, at.Node("node1"), at, Options{Sizes: most, Start: start, MaxMemory: sizing.Memory(start) + 100<<10, Reporter: problems})
	fleet(n, 0, 1500)
	n.sync(t)
	placed := len(n.fleetNames())
	if unplaced := len(n.tier.Unplaced()); placed == 0 || unplaced == 0 || len(problems.capacity()) == 0 {
		t.Errorf("%d Services are served, %d are not, and %d problems are reported", placed, unplaced, len(problems.capacity()))
	}
	if first := problems.capacity()[0].Message; !strings.Contains(first, "raise --ebpf-max-map-memory") {
		t.Errorf("reported: %s", first)
	}
	if memory := n.tier.Growth().Bytes; memory > n.tier.growth.limits.Memory || n.tier.sizes == start {
		t.Errorf("maps of %d bytes, %d being allowed: %+v", memory, n.tier.growth.limits.Memory, n.tier.sizes)
	}
	checkGeneration(t, n.tier)
	// What leaves makes room.
	for i := range 1460 {
		n.OnServiceDelete(writertest.Service(fmt.Sprintf("fleet-%d", i), fmt.Sprintf("10.96.%d.%d", 100+i/200, 1+i%200)))
	}
	n.sync(t)
	if unplaced := n.tier.Unplaced(); len(unplaced) > 0 {
		t.Errorf("%d service ports do not fit", len(unplaced))
	}
}

// TestGrownMapsAreAdopted: the next process goes on with maps that grew, and replaces them when they hold little.
func TestGrownMapsAreAdopted(t *testing.T) {
	start, most := smallStart()
	at := lab.NewT(t)
	opts := Options{Sizes: most, Start: start}
	n := newNode(t, at.Node("node1"), at, opts)
	fleet(n, 0, 1500)
	n.sync(t)
	grown := n.tier.sizes
	if grown == start {
		t.Fatal("the maps did not grow")
	}
	n.close()
	n.start(t, opts)
	if !n.tier.Adopted() || n.tier.sizes != grown {
		t.Errorf("adopted: %v, %+v, want %+v", n.tier.Adopted(), n.tier.sizes, grown)
	}
	n.close()
	n.start(t, Options{Sizes: lbmap.DefaultSizes()}) // much larger ones
	fleet(n, 0, 10)
	n.sync(t)
	most = lbmap.DefaultSizes()
	start = sizing.Flows(start, most, sizing.Levels(most)-1)
	opts = Options{Sizes: most, Start: start}
	ids, err := n.tier.maps["tdm_flow_free"].Clone()
	if err != nil {
		t.Fatal(err)
	}
	defer ids.Close()
	// begin is as if so many flows began.
	begin := func(count int) {
		t.Helper()
		var list lbmap.FlowList
		if err := ids.Lookup(uint32(0), &list); err != nil {
			t.Fatal(err)
		}
		list.Used += uint64(count)
		if err := ids.Put(uint32(0), list); err != nil {
			t.Fatal(err)
		}
	}
	n.close()
	young := int(start.YoungFlows)
	begin(young)
	n.start(t, opts)
	if n.tier.sizes.YoungFlows < 2*start.YoungFlows {
		t.Errorf("%+v for %d young flows", n.tier.sizes, young)
	}
	n.close()
	begin(-young)
	n.start(t, opts)
	if n.tier.Adopted() || n.tier.sizes.Services != start.Services || n.tier.sizes.Frontends != start.Frontends {
		t.Errorf("adopted: %v, %+v for ten Services", n.tier.Adopted(), n.tier.sizes)
	}
	fleet(n, 0, 10)
	n.sync(t)
	checkGeneration(t, n.tier)
	if got := len(n.fleetNames()); got != 10 {
		t.Errorf("%d Services are served, want 10", got)
	}
}
