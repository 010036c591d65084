// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// ipip, geneve and opt are the flags for each form of packets between nodes.
var (
	ipip   = []string{"--lb-mode=dsr"}
	geneve = []string{"--lb-mode=dsr", "--dsr-dispatch=geneve"}
	opt    = []string{"--lb-mode=dsr", "--dsr-dispatch=opt"}
	// prefixed is ipip from addresses of no node.
	prefixed = []string{"--lb-mode=dsr", "--dsr-source-cidr=100.65.0.0/16,fd00:65::/64"}
)

// directStage is a Service whose endpoints are on node2 and node3, and a client outside that dials node1. All three have a
// process of their own.
type directStage struct {
	lab       *lab.Lab
	nodes     []*lab.Node
	pods      []*lab.Pod // on all nodes but the first
	far       *lab.Client
	dir       string
	processes []*process
}

func newDirectStage(t testing.TB, serve func(testing.TB, *lab.Pod) *lab.Pod, opts ...lab.Options) *directStage {
	t.Helper()
	s := &directStage{lab: lab.NewT(t, opts...), dir: t.TempDir()}
	for i := range 3 {
		n := s.lab.Node(fmt.Sprintf("node%d", i+1))
		s.nodes = append(s.nodes, n)
		if i > 0 {
			s.pods = append(s.pods, serve(t, n.Pod("pod"+strconv.Itoa(i+1))))
		}
	}
	s.far = s.lab.Client("client")
	announce(t, s.lab, s.nodes[0], outside(s.nodes[0]))
	writeManifests(t, s.dir, loadBalancer, s.pods...)
	s.processes = make([]*process, len(s.nodes))
	return s
}

// start replaces the process of a node.
func (s *directStage) start(t testing.TB, node int, flags ...string) {
	t.Helper()
	if p := s.processes[node]; p != nil {
		p.Terminate(t)
	}
	// On a slow machine, minutes pass until a flow is checked again.
	p := start(t, s.nodes[node], s.dir, append(flags, "--conntrack-udp-timeout-stream=20m")...)
	p.serves(t)
	s.processes[node] = p
}

func (s *directStage) startAll(t testing.TB, flags ...string) {
	t.Helper()
	for i := range s.nodes {
		s.start(t, i, flags...)
	}
}

func (s *directStage) end(t testing.TB) {
	t.Helper()
	for i, p := range s.processes {
		if p != nil {
			_ = p.Close()
		}
		cleanup(t, s.nodes[i])
	}
}

// sees is the condition that endpoints see as the client an address for which is returns true, for all ways.
func (s *directStage) sees(t testing.TB, ways map[string]netip.AddrPort, what string, is func(netip.Addr) bool) {
	t.Helper()
	for name, to := range ways {
		await(t, name+": the endpoint sees "+what, func() error {
			for range 4 { // of several endpoints
				reply, err := s.far.Ask(t.Context(), name[:3], to)
				if err != nil {
					return err
				}
				if !is(reply.Peer.Addr()) {
					return fmt.Errorf("%s sees %s", reply.Server, reply.Peer)
				}
			}
			return nil
		})
	}
}

func (s *directStage) isClient(a netip.Addr) bool { return a == s.far.Addr4 || a == s.far.Addr6 }

// metric is the value of a series of a node; 0 without it.
func metric(t testing.TB, n *lab.Node, series string) float64 {
	t.Helper()
	metrics, err := n.Fetch(t.Context(), 10249, "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(metrics) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			value, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err != nil {
				t.Fatal(err)
			}
			return value
		}
	}
	return 0
}

// counted is how many packets a node counted by verdict.
func counted(t testing.TB, n *lab.Node, result string) float64 {
	t.Helper()
	return metric(t, n, fmt.Sprintf("tandem_packets_total{result=%q}", result))
}

// ready waits until a node knows of so many endpoints that their nodes take direct server return.
func (s *directStage) ready(t testing.TB, node, endpoints int) {
	t.Helper()
	await(t, s.nodes[node].Name+": the answers of other nodes", func() error {
		const series = "tandem_direct_server_return_endpoints{state=%q}"
		ready, others := metric(t, s.nodes[node], fmt.Sprintf(series, "ready")), metric(t, s.nodes[node], fmt.Sprintf(series, "masqueraded"))
		if ready != float64(endpoints) || others != 0 {
			return fmt.Errorf("%v endpoints are ready, want %d, and %v others", ready, endpoints, others)
		}
		return nil
	})
}

// step has the load go on, and fails at once if it or a long-lived flow did.
func (s *directStage) step(t testing.TB, w *lab.Load, long []flow, what string) {
	t.Helper()
	w.More(100)
	checkAll(t, long)
	if t.Failed() {
		t.Fatal(what)
	}
}

// directCases are what the network cards of nodes can do, and the form of packets between nodes.
var directCases = []struct {
	name    string
	offload bool
	flags   []string
}{
	{"ipip", true, ipip}, {"ipip, no offload", false, ipip}, {"geneve", true, geneve}, {"geneve, no offload", false, geneve},
	{"opt", true, opt}, {"opt, no offload", false, opt}, {"ipip, from prefixes", true, prefixed},
}

// TestDirect: with direct server return, endpoints on other nodes see the client, for every kind of frontend, and their
// nodes answer it; replies do not come by the node that it dialed.
func TestDirect(t *testing.T) {
	for _, c := range directCases {
		t.Run(c.name, func(t *testing.T) {
			s := newDirectStage(t, serve, lab.Options{NoOffload: !c.offload})
			defer s.end(t)
			s.startAll(t, c.flags...)
			s.ready(t, 0, 4) // two pods, of two families
			ways := outside(s.nodes[0])
			before := counted(t, s.nodes[0], "forwarded_reply")
			seen, err := s.nodes[1].Capture(lab.Uplink, func(p lab.Captured) bool { return !p.Outgoing })
			if err != nil {
				t.Fatal(err)
			}
			s.sees(t, ways, "the client", s.isClient)
			forms := map[string]int{}
			spread := map[netip.Addr]bool{}
			for _, p := range seen.Packets() {
				switch protocol := p.Protocol(); {
				case protocol == unix.IPPROTO_IPIP, protocol == unix.IPPROTO_IPV6:
					forms["ipip"]++
					if from := p.Source().Addr(); from != s.nodes[0].Addr4 && from != s.nodes[0].Addr6 {
						spread[from] = true
					}
				case p.UDP != nil && p.UDP.Dst == lbmap.GenevePort:
					forms["geneve"]++
				case p.IPv4 != nil && len(p.IPv4.Options) > 0, p.IPv6 != nil && len(p.IPv6.Extensions) > 0:
					forms["opt"]++
				}
			}
			if err := seen.Close(); err != nil {
				t.Error(err)
			}
			if form, _, _ := strings.Cut(c.name, ","); forms[form] == 0 || len(forms) > 1 {
				t.Errorf("packets by form: %v", forms)
			}
			if wanted := slices.Equal(c.flags, prefixed); wanted != (len(spread) > 1) || !wanted && len(spread) > 0 {
				t.Errorf("IP in IP came from %v", slices.Collect(maps.Keys(spread)))
			}
			if after := counted(t, s.nodes[0], "forwarded_reply"); after != before {
				t.Errorf("%v replies came by node1", after-before)
			}
			if counted(t, s.nodes[0], "forwarded_direct") == 0 {
				t.Error("node1 put no packet into another")
			}
			for _, n := range s.nodes[1:] {
				if counted(t, n, "unwrapped") == 0 {
					t.Errorf("%s took no packet out of another", n.Name)
				}
			}
		})
	}
}

// TestDirectNodes: a node takes packets of direct server return from addresses of nodes in the API alone. Others are masqueraded, as they
// get no answer to probes, and get it as soon as the Node is there.
func TestDirectNodes(t *testing.T) {
	for form, flags := range map[string][]string{"ipip": ipip, "opt": opt} {
		t.Run(form, func(t *testing.T) { testDirectNodes(t, flags) })
	}
}

func testDirectNodes(t *testing.T, flags []string) {
	s := newDirectStage(t, serve)
	defer s.end(t)
	var nodes []fakeapi.Object
	for _, n := range s.nodes {
		nodes = append(nodes, upstream.NodeObject(n))
	}
	apis := make([]*fakeapi.API, len(s.nodes))
	for i, n := range s.nodes {
		apis[i] = fakeapi.New(append(append(endpoints(s.pods[0]), everyKind()), nodes...)...)
		s.processes[i] = startWith(t, n, apis[i], flags...)
		s.processes[i].serves(t)
	}
	s.ready(t, 0, 2) // one pod, of two families
	ways := outside(s.nodes[0])
	s.sees(t, ways, "the client", s.isClient)
	// The Node is missing where the endpoint is.
	apis[1].Delete(nodes[0])
	s.sees(t, ways, "node1", func(a netip.Addr) bool { return !s.isClient(a) })
	apis[1].Put(nodes[0])
	s.sees(t, ways, "the client again", s.isClient)
}

// TestDirectSources: nodes get a prefix of sources one after the other. Connections from before go on, and new ones are masqueraded as long
// as the endpoint's node does not take packets from the prefix.
func TestDirectSources(t *testing.T) {
	s := newDirectStage(t, serve)
	defer s.end(t)
	objects := append(endpoints(s.pods[0]), everyKind())
	for _, n := range s.nodes {
		objects = append(objects, upstream.NodeObject(n))
	}
	api := fakeapi.New(objects...)
	begin := func(node int, flags []string) {
		t.Helper()
		if p := s.processes[node]; p != nil {
			p.Terminate(t)
		}
		s.processes[node] = startWith(t, s.nodes[node], api, flags...)
		s.processes[node].serves(t)
	}
	for i := range s.nodes {
		begin(i, ipip)
	}
	s.ready(t, 0, 2) // one pod, of two families
	ways := outside(s.nodes[0])
	s.sees(t, ways, "the client", s.isClient)
	long := openFlows(t, s.far.Sandbox, ways, s.pods[0])
	begin(0, prefixed)
	checkAll(t, long)
	s.sees(t, ways, "node1", func(a netip.Addr) bool { return !s.isClient(a) })
	for i := range s.nodes[1:] {
		begin(1+i, prefixed)
		checkAll(t, long)
	}
	s.sees(t, ways, "the client again", s.isClient)
	checkAll(t, append(long, openFlows(t, s.far.Sandbox, ways, s.pods[0])...))
}

// TestDirectUnderLoad: while processes are killed, replaced and change between the modes, on either side, no connection fails, and
// long-lived ones go on to the same endpoints.
func TestDirectUnderLoad(t *testing.T) {
	s := newDirectStage(t, serve, lab.Options{PortsInTurn: true}) // see TestDirectOnePort
	defer s.end(t)
	s.startAll(t, "--lb-mode=dsr")
	s.ready(t, 0, 4)
	ways := outside(s.nodes[0])
	direct := openFlows(t, s.far.Sandbox, ways, s.pods...)
	w := lab.NewLoad(t)
	defer w.End()
	w.Use(s.far.Sandbox, ways, gently)
	step := func(what string) { t.Helper(); s.step(t, w, direct, what) }
	step("direct")
	for i := range s.nodes[:2] {
		_ = s.processes[i].Close()
		s.processes[i] = nil
		step("killed")
		s.start(t, i, "--lb-mode=dsr")
		step("started again")
	}
	s.ready(t, 0, 4)
	// Nodes that disagree take each other's packets.
	for _, change := range []struct {
		node  int
		flags []string
	}{{0, geneve}, {1, geneve}, {0, opt}, {1, opt}, {2, opt}, {0, opt}, {0, geneve}, {0, opt}} {
		s.start(t, change.node, change.flags...)
		step(fmt.Sprintf("node%d with %s", change.node+1, change.flags[1]))
		s.ready(t, 0, 4)
		step("its answers are known")
	}
	// Of mode snat on the side of the clients, then on both, and back in the other order.
	for _, change := range []struct {
		node int
		mode string
	}{{0, "snat"}, {0, "dsr"}, {1, "snat"}, {2, "snat"}, {0, "snat"}, {1, "hybrid"}, {2, "dsr"}, {0, "dsr"}} {
		s.start(t, change.node, "--lb-mode="+change.mode)
		step(fmt.Sprintf("node%d with mode %s", change.node+1, change.mode))
	}
	w.End()
	few(t, w)
}

// directFlows is how many TCP connections, and UDP flows, TestDirectMoves has.
const directFlows = 10000

// TestDirectMoves: connections to load balancer IPs go on to the same endpoints when the network leads them to another node, as after a
// fail-over of MetalLB or kube-vip, or a change of ECMP. If an endpoint has left before they move, those to it break, and of the others
// the few whose slot of the table is another one's now.
func TestDirectMoves(t *testing.T) {
	for form, flags := range map[string][]string{"ipip": ipip, "opt": opt} {
		t.Run(form, func(t *testing.T) { testDirectMoves(t, flags) })
	}
}

func testDirectMoves(t *testing.T, flags []string) {
	const perNode = 5
	spawn := func(t testing.TB, p *lab.Pod) *lab.Pod {
		t.Helper()
		if _, err := p.SpawnServer(targetPort); err != nil {
			t.Fatal(err)
		}
		return p
	}
	s := newDirectStage(t, spawn)
	defer s.end(t)
	for i := range 2 * (perNode - 1) {
		n := s.nodes[1+i%2]
		s.pods = append(s.pods, spawn(t, n.Pod(fmt.Sprintf("more%d", i))))
	}
	writeManifests(t, s.dir, loadBalancer, s.pods...)
	s.startAll(t, flags...)
	for i := range s.nodes {
		s.ready(t, i, []int{4, 2, 2}[i]*perNode)
	}
	ways := outside(s.nodes[0])
	maps.DeleteFunc(ways, func(name string, _ netip.AddrPort) bool { return !strings.HasSuffix(name, "IP") })
	each := kernel.Rounds(directFlows) / int(lab.Slower()*lab.Slower())
	places := []place{{s.far.Sandbox, ways}}
	for i := 1; i*crowdSize < each; i++ {
		places = append(places, place{s.lab.Client(fmt.Sprintf("client%d", i)).Sandbox, ways})
	}
	c := openCrowd(t, places, each)
	defer c.end(t)
	for _, i := range []int{2, 0, 2} {
		announce(t, s.lab, s.nodes[i], ways)
		c.more(t)
		if broken := c.broken(); len(broken) > 0 {
			t.Fatalf("%d of %d connections broke when they moved to %s", len(broken), 2*each, s.nodes[i].Name)
		}
	}

	// The last one leaves, and connections move to a node that has not seen them.
	left := s.pods[len(s.pods)-1]
	writeManifests(t, s.dir, loadBalancer, s.pods[:len(s.pods)-1]...)
	for i := range s.nodes {
		s.ready(t, i, []int{4*perNode - 2, 2*perNode - 2, 2 * perNode}[i])
	}
	c.more(t)
	announce(t, s.lab, s.nodes[1], ways)
	c.more(t)
	broken := c.broken()
	c.expected = len(broken)
	of := 0
	for _, text := range broken {
		if strings.Contains(text, left.Name) {
			of++
		}
	}
	t.Logf("%d of %d connections broke, %d of them to the endpoint that left", len(broken), 2*each, of)
	// Its share is a tenth, and Maglev moves a few per cent; of few connections, chance moves more.
	if share := 2 * each / (2 * perNode); of == 0 || of > share*3/2+10 || len(broken)-of > 2*each*5/100+5 {
		t.Errorf("%d connections broke, %d of them to the endpoint that left, whose share is %d", len(broken), of, share)
	}
}

// serveBulk starts servers for transfers in a pod.
func serveBulk(t testing.TB, p *lab.Pod) *lab.Pod {
	t.Helper()
	if _, err := p.ServeBulk(targetPort); err != nil {
		t.Fatal(err)
	}
	if _, err := p.ServeEcho(targetPort); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestDirectTransfers: packets as large as the network allows, and larger datagrams, reach endpoints and clients by direct
// server return.
func TestDirectTransfers(t *testing.T) {
	for _, c := range directCases {
		t.Run(c.name, func(t *testing.T) {
			s := newDirectStage(t, serveBulk, lab.Options{NoOffload: !c.offload})
			defer s.end(t)
			s.startAll(t, c.flags...)
			s.ready(t, 0, 4)
			before := counted(t, s.nodes[0], "forwarded_reply")
			for name, to := range outside(s.nodes[0]) {
				for range 3 {
					if name[:3] == "tcp" {
						if err := s.far.Bulk(t.Context(), to, 4<<20); err != nil {
							t.Errorf("%s: %v", name, err)
						}
						continue
					}
					for _, size := range []int{64, 1400, 4000} {
						// The client learns the MTU by its first datagram that is too large.
						await(t, fmt.Sprintf("%s, %d bytes", name, size), func() error { return s.far.Echo(t.Context(), to, size) })
					}
				}
			}
			if after := counted(t, s.nodes[0], "forwarded_reply"); after != before {
				t.Errorf("%v replies came by node1", after-before)
			}
			// Clients sent nothing that was too large by TCP.
			if n := counted(t, s.nodes[0], "error_too_big"); n > 40 {
				t.Errorf("%v packets were too large", n)
			}
		})
	}
}

// TestDirectTransferMoves: transfers go on while their connections move to a node that has not seen them. The first packet there, which has
// the option, is of many segments.
func TestDirectTransferMoves(t *testing.T) {
	s := newDirectStage(t, serveBulk)
	defer s.end(t)
	s.startAll(t, opt...)
	for i := range s.nodes {
		s.ready(t, i, []int{4, 2, 2}[i])
	}
	ways := outside(s.nodes[0])
	maps.DeleteFunc(ways, func(name string, _ netip.AddrPort) bool {
		return !strings.HasPrefix(name, "tcp") || !strings.HasSuffix(name, "IP")
	})
	before := counted(t, s.nodes[2], "forwarded_direct")
	var transfers sync.WaitGroup
	for name, to := range ways {
		for range 4 {
			c, err := s.far.Dial(t.Context(), "tcp", to)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			defer c.Close()
			if err := lab.BulkConn(t.Context(), c, 1<<10); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			transfers.Go(func() {
				if err := lab.BulkConn(t.Context(), c, 32<<20); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			})
		}
	}
	announce(t, s.lab, s.nodes[2], ways)
	transfers.Wait()
	if counted(t, s.nodes[2], "forwarded_direct") == before {
		t.Error("node3 forwarded nothing")
	}
	for _, n := range s.nodes {
		if lost := counted(t, n, "dropped_rewrite"); lost > 0 {
			t.Errorf("%s could not translate %v packets", n.Name, lost)
		}
	}
}

// narrow is the MTU of the path between nodes in TestDirectPathMTU. All devices have 1500.
const narrow = 1400

// throughFabric has packets from the first node to the pods on others go by a router whose routes have a smaller MTU.
func (s *directStage) throughFabric(mtu int) error {
	route := func(at *lab.Sandbox, device string, r netlink.Route) error {
		return at.Do(func() error {
			link, err := netlink.LinkByName(device)
			if err != nil {
				return err
			}
			r.LinkIndex = link.Attrs().Index
			return netlink.RouteReplace(&r)
		})
	}
	fabric := s.lab.Fabric()
	for _, p := range s.pods {
		for _, via := range []struct{ pod, router, node netip.Addr }{{p.Addr4, fabric.Addr4, p.Node.Addr4}, {p.Addr6, fabric.Addr6, p.Node.Addr6}} {
			to := &net.IPNet{IP: via.pod.AsSlice(), Mask: net.CIDRMask(via.pod.BitLen(), via.pod.BitLen())}
			err := errors.Join(
				route(s.nodes[0].Sandbox, lab.Uplink, netlink.Route{Dst: to, Gw: via.router.AsSlice()}),
				route(fabric, "br0", netlink.Route{Dst: to, Gw: via.node.AsSlice(), MTU: mtu, MTULock: true}))
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// TestDirectPathMTU: where the path between nodes has a smaller MTU than their devices, a router tells the client's node, and that the
// client. It is not so for packets with options, whose errors go to the client itself, nor for those from a prefix, whose errors are lost.
func TestDirectPathMTU(t *testing.T) {
	for _, c := range directCases {
		if slices.Contains(c.flags, opt[1]) || slices.Equal(c.flags, prefixed) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			s := newDirectStage(t, serveBulk, lab.Options{NoOffload: !c.offload})
			defer s.end(t)
			if err := s.throughFabric(narrow); err != nil {
				t.Fatal(err)
			}
			s.startAll(t, c.flags...)
			s.ready(t, 0, 4)
			told, err := s.far.Capture(lab.Uplink, func(p lab.Captured) bool { return !p.Outgoing && p.ICMP != nil && p.ICMP.Quoted != nil })
			if err != nil {
				t.Fatal(err)
			}
			for name, to := range outside(s.nodes[0]) {
				if name[:3] == "tcp" {
					if err := s.far.Bulk(t.Context(), to, 1<<20); err != nil {
						t.Errorf("%s: %v", name, err)
					}
				} else {
					// The client learns the MTU by its first datagram that is too large.
					await(t, name+", 1400 bytes", func() error { return s.far.Echo(t.Context(), to, 1400) })
				}
				overhead := uint32(map[bool]int{true: 20, false: 40}[to.Addr().Is4()])
				if slices.Contains(c.flags, geneve[1]) {
					overhead += 16
				}
				// Of this connection, or of an earlier one to the same address.
				await(t, fmt.Sprintf("%s: an error that tells the client an MTU of %d", name, narrow-overhead), func() error {
					mtus := map[uint32]bool{}
					for _, p := range told.Packets() {
						if p.ICMP.Quoted.Destination().Addr() == to.Addr() {
							mtus[p.ICMP.Rest] = true
						}
					}
					if !mtus[narrow-overhead] {
						return fmt.Errorf("it was told %v", mtus)
					}
					return nil
				})
			}
			if err := told.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestDirectOnePort: a client may use one source port for several frontends that lead to the same endpoints, by direct server return and
// masqueraded, at the same time. Where segments do not say which frontend they are for, the later connection by direct server return is reset.
func TestDirectOnePort(t *testing.T) {
	for form, flags := range map[string][]string{"ipip": ipip, "opt": opt} {
		t.Run(form, func(t *testing.T) { testDirectOnePort(t, flags) })
	}
}

func testDirectOnePort(t *testing.T, flags []string) {
	s := newDirectStage(t, serve)
	defer s.end(t)
	const other = `---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: plain, annotations: {service.tandem-proxy.dev/forwarding-mode: snat}}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.11
  clusterIPs: ["10.96.0.11"]
  ports: [{name: t, port: 80, protocol: TCP}, {name: u, port: 80, protocol: UDP}]
status: {loadBalancer: {ingress: [{ip: 203.0.113.11}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: plain-4, labels: {kubernetes.io/service-name: plain}}
addressType: IPv4
ports: [{name: t, port: %d, protocol: TCP}, {name: u, port: %[1]d, protocol: UDP}]
endpoints:
- {addresses: [%[2]q], nodeName: %[3]s}
- {addresses: [%[4]q], nodeName: %[5]s}
`
	writeManifest(t, s.dir, "plain.yaml", fmt.Sprintf(other, targetPort, s.pods[0].Addr4, s.pods[0].Node.Name, s.pods[1].Addr4, s.pods[1].Node.Name))
	ways := map[string]netip.AddrPort{
		"load balancer IP": netip.MustParseAddrPort("203.0.113.10:80"), "node port": netip.AddrPortFrom(s.nodes[0].Addr4, 30080), "masqueraded": netip.MustParseAddrPort("203.0.113.11:80"),
	}
	announce(t, s.lab, s.nodes[0], ways)
	s.startAll(t, flags...)
	s.ready(t, 0, 4)
	for _, network := range []string{"tcp", "udp"} {
		var flows []flow
		refused := 0
		for port := uint16(20000); port < 20012; port++ {
			for name, to := range ways {
				c, err := s.far.DialFrom(t.Context(), network, port, to)
				if errors.Is(err, unix.ECONNREFUSED) {
					refused++
					continue
				}
				if err != nil {
					t.Fatalf("%s from port %d to the %s: %v", network, port, name, err)
				}
				defer c.Close()
				r, err := lab.AskConn(t.Context(), c)
				if err != nil {
					t.Fatalf("%s from port %d to the %s: %v", network, port, name, err)
				}
				if is := s.isClient(r.Peer.Addr()); is == (name == "masqueraded") && r.Peer.Port() == port {
					t.Errorf("%s from port %d to the %s: the endpoint sees %s", network, port, name, r.Peer)
				}
				flows = append(flows, flow{c, r})
			}
		}
		// Two frontends lead to the same one of two endpoints.
		if may := network == "tcp" && slices.Contains(flags, opt[1]); may != (refused > 0) || refused > 12 {
			t.Errorf("%d connections over %s are refused", refused, network)
		}
		checkAll(t, flows)
	}
}

// TestDirectHostNetwork: endpoints in the network of their node take part too.
func TestDirectHostNetwork(t *testing.T) {
	for form, flags := range map[string][]string{"ipip": ipip, "opt": opt} {
		t.Run(form, func(t *testing.T) { testDirectHostNetwork(t, flags) })
	}
}

func testDirectHostNetwork(t *testing.T, flags []string) {
	s := newDirectStage(t, serve)
	defer s.end(t)
	n := s.nodes[1]
	for _, serve := range []func(uint16) (*lab.Server, error){n.ServeTCP, n.ServeUDP} {
		if _, err := serve(targetPort); err != nil {
			t.Fatal(err)
		}
	}
	slices := ""
	for family, addr := range map[string]netip.Addr{"IPv4": n.Addr4, "IPv6": n.Addr6} {
		slices += fmt.Sprintf(`---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-%s, labels: {kubernetes.io/service-name: web}}
addressType: %s
ports: [{name: t, port: %d, protocol: TCP}, {name: u, port: %[3]d, protocol: UDP}]
endpoints: [{addresses: [%[4]q], nodeName: %[5]s}]
`, strings.ToLower(family), family, targetPort, addr, n.Name)
	}
	writeManifest(t, s.dir, "web.yaml", loadBalancer+slices)
	s.startAll(t, flags...)
	s.ready(t, 0, 2)
	s.sees(t, outside(s.nodes[0]), "the client", s.isClient)
}
