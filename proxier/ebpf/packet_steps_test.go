// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	ebpfdatapath "github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// ends are the addresses in tables of packets, in one family. Services have port 80, backends
// 8080.
type ends struct {
	proxier.Family
	client, stranger netip.AddrPort // outside
	podOfNode2       netip.AddrPort
	here, there      netip.AddrPort // backends on this node and on node2
	there2           netip.AddrPort
	// Services, named after their endpoints or purpose.
	local, remote, twin, empty, quiet, sticky, both netip.AddrPort
	lost, astray                                    netip.AddrPort // with a backend on node2 that no route leads to, or that of a pod here
	away                                            netip.AddrPort // the backend of lost
	balancer                                        netip.AddrPort // load balancer IP of local, for client only
	nodePort, quietPort                             netip.AddrPort // NodePorts of local, and of quiet, which has policy Local
	elsewhere                                       netip.AddrPort // nodePort's port, at an address without NodePorts
	unserved, inner                                 netip.AddrPort // addresses in the range of ClusterIPs: an unallocated one, and one of this node
	router                                          netip.Addr
	nat                                             netip.AddrPort // the client's address and port towards other nodes
}

// onePort leaves a single source port, so that results are predictable.
var onePort = ebpfdatapath.PortRange{First: 1025, Last: 65535}

func endsOf(f proxier.Family) ends {
	at := func(four, six string, port uint16) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr([proxier.Families]string{four, six}[f]), port)
	}
	return ends{
		Family: f,
		client: at("198.51.100.1", "2001:db8:51:100::1", 1000), stranger: at("198.51.100.2", "2001:db8:51:100::2", 1000),
		podOfNode2: at("10.244.2.7", "fd00:10:244:2::7", 1000),
		here:       at("10.244.1.1", "fd00:10:244:1::1", 8080),
		there:      at("10.244.2.1", "fd00:10:244:2::1", 8080), there2: at("10.244.2.2", "fd00:10:244:2::2", 8080),
		local: at("10.96.0.1", "fd00:10:96::1", 80), remote: at("10.96.0.2", "fd00:10:96::2", 80),
		twin: at("10.96.0.3", "fd00:10:96::3", 80), empty: at("10.96.0.4", "fd00:10:96::4", 80),
		quiet: at("10.96.0.5", "fd00:10:96::5", 80), sticky: at("10.96.0.6", "fd00:10:96::6", 80),
		both: at("10.96.0.7", "fd00:10:96::7", 80), lost: at("10.96.0.8", "fd00:10:96::8", 80), astray: at("10.96.0.9", "fd00:10:96::9", 80),
		away:     at("10.244.1.8", "fd00:10:244:1::8", 8080),
		balancer: at("203.0.113.1", "2001:db8:203:113::1", 80),
		nodePort: at("172.18.0.1", "fd00:18::1", 30080), quietPort: at("172.18.0.1", "fd00:18::1", 30081), elsewhere: at("192.168.7.1", "fd00:7::1", 30080),
		unserved: at("10.96.0.99", "fd00:10:96::99", 80), inner: netip.AddrPortFrom([proxier.Families]netip.Addr{inner4, inner6}[f], 80),
		router: at("192.0.2.1", "2001:db8:1::1", 0).Addr(),
		nat:    at("172.18.0.1", "fd00:18::1", onePort.First-1),
	}
}

// endsCluster creates the Services of the tables. All are dual-stack, with TCP and UDP.
func (p *path) endsCluster(t testing.TB) {
	t.Helper()
	for i, s := range []struct {
		name      string
		endpoints string
		mutate    func(*v1.Service)
	}{
		{name: "local", endpoints: "here", mutate: func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			for i := range s.Spec.Ports {
				s.Spec.Ports[i].NodePort = 30080
			}
			s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.1/32", "2001:db8:51:100::1/128"}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "2001:db8:203:113::1"}}
		}},
		{name: "remote", endpoints: "there"},
		{name: "twin", endpoints: "here"},
		{name: "empty"},
		{name: "quiet", endpoints: "there", mutate: func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeNodePort
			s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
			s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
			for i := range s.Spec.Ports {
				s.Spec.Ports[i].NodePort = 30081
			}
		}},
		{name: "sticky", endpoints: "here there there2", mutate: func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP }},
		{name: "both", endpoints: "there there2"},
		{name: "lost", endpoints: "away"},
		{name: "astray", endpoints: "astray"},
	} {
		service := writertest.Service(s.name, fmt.Sprintf("10.96.0.%d", i+1))
		service.Spec.ClusterIPs = []string{service.Spec.ClusterIP, fmt.Sprintf("fd00:10:96::%d", i+1)}
		service.Spec.Ports = []v1.ServicePort{{Name: "p", Port: 80, Protocol: v1.ProtocolTCP}, {Name: "u", Port: 80, Protocol: v1.ProtocolUDP}}
		if s.mutate != nil {
			s.mutate(service)
		}
		p.OnServiceAdd(service)
		p.setEndpoints(s.name, s.endpoints)
	}
	if err := p.sync(); err != nil {
		t.Fatal(err)
	}
}

// setEndpoints gives a Service endpoints, by their names in ends.
func (p *path) setEndpoints(service, names string) {
	four, six := endsOf(proxier.IPv4), endsOf(proxier.IPv6)
	for _, e := range []ends{four, six} {
		s := writertest.Slice(service+"-"+e.String(), service)
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To("u"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolUDP)})
		if e.Family == proxier.IPv6 {
			s.AddressType = discoveryv1.AddressTypeIPv6
		}
		for _, name := range strings.Fields(names) {
			addr := map[string]netip.AddrPort{"here": e.here, "astray": e.here, "there": e.there, "there2": e.there2, "away": e.away}[name].Addr()
			node := map[bool]string{true: p.at.Name, false: p.node2.Name}[name == "here"]
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{addr.String()}, NodeName: &node})
		}
		p.OnEndpointSliceUpdate(nil, s)
	}
}

// step sends a packet at a hook, and compares the result; or makes something else happen.
type step struct {
	hook    datapath.Hook
	send    packet.Packet
	verdict int32
	want    packet.Packet // nothing: unchanged
	reason  string        // the counters that increase
	happens func(*path) error
}

// Short names for the tables.
const (
	in, out              = datapath.In, datapath.Out
	next, shot, redirect = datapath.Next, datapath.Shot, datapath.Redirect
)

var same packet.Packet

// scene is an entry of a table: steps, and the resulting flows and statistics, which are compared
// unless they are nil.
type scene struct {
	name  string
	steps []step
	flows []string
	stats map[string]lbmap.ServiceStats // by Service, sum of TCP and UDP
}

// sceneTables lists all tables.
var sceneTables = []struct {
	name   string
	scenes func(*path, ends) []scene
}{
	{"Forward", forwardScenes}, {"Flow", flowScenes}, {"Source", sourceScenes}, {"Reject", rejectScenes}, {"Hop", hopScenes},
	{"ICMP", icmpScenes}, {"Fragment", fragmentScenes}, {"Header", headerScenes},
}

// TestPacketScenes plays hand-written packets. TestPackets has random ones.
func TestPacketScenes(t *testing.T) {
	p := newPath(t, Options{NodePortRange: onePort})
	p.endsCluster(t)
	for _, table := range sceneTables {
		t.Run(table.name, func(t *testing.T) { p.play(t, table.scenes) })
	}
}

// play plays scenes in both families.
func (p *path) play(t *testing.T, scenes func(*path, ends) []scene) {
	for family := range proxier.Families {
		for _, s := range scenes(p, endsOf(family)) {
			t.Run(family.String()+"/"+s.name, func(t *testing.T) {
				if err := p.reset(); err != nil {
					t.Fatal(err)
				}
				before := p.serviceStats()
				for i := range s.steps {
					if err := p.at.Do(func() error { return p.step(&s.steps[i]) }); err != nil {
						t.Fatalf("step %d: %v", i+1, err)
					}
				}
				p.compare(t, &s, before)
			})
		}
	}
}

func (p *path) step(s *step) error {
	if s.happens != nil {
		return s.happens(p)
	}
	before, err := p.reasons()
	if err != nil {
		return err
	}
	send := p.frame(s.send)
	got, err := p.run(s.hook, send)
	if err != nil {
		return err
	}
	if got.Verdict != s.verdict {
		return fmt.Errorf("verdict %d, want %d, of\n%s\nwhich becomes\n%s", got.Verdict, s.verdict, packet.Parse(send), packet.Parse(got.Frame))
	}
	if err := compareFrames(s, send, got.Frame); err != nil {
		return err
	}
	after, err := p.reasons()
	if err != nil {
		return err
	}
	for name := range after {
		if want := before[name] + map[bool]uint64{true: 1}[slices.Contains(strings.Split(s.reason, " "), name)]; after[name] != want {
			return fmt.Errorf("%s counts %d, want %d", name, after[name], want)
		}
	}
	if err := p.model.Check(s.hook, send, got); err != nil {
		return fmt.Errorf("the model disagrees: %w", err)
	}
	return nil
}

// frame returns a packet as it arrives at this node.
func (p *path) frame(q packet.Packet) []byte {
	if q.Ethernet == nil {
		q.Ethernet = &packet.Ethernet{Dst: p.mac, Src: gatewayMAC}
	}
	return q.Build()
}

var gatewayMAC = packet.MAC{2, 0, 0, 0, 0, 1}

// compareFrames compares the resulting frame with the expected one.
func compareFrames(s *step, send, got []byte) error {
	if s.verdict == shot {
		return nil
	}
	if isNothing(s.want) {
		if !bytes.Equal(got, send) {
			return fmt.Errorf("it was changed (-want +got)\n%s", cmp.Diff(packet.Parse(send).String(), packet.Parse(got).String()))
		}
		return nil
	}
	result, want := packet.Parse(got), s.want
	if want.Ethernet == nil {
		want.Ethernet = packet.Parse(send).Ethernet
	}
	// want is encoded first, because packets in ICMP errors have their own lengths.
	if diff := cmp.Diff(packet.Parse(want.Build()).String(), result.String()); diff != "" {
		return fmt.Errorf("(-want +got)\n%s", diff)
	}
	f, _ := s.send.Fragment()
	if s.send.Verify() == nil && f == (packet.Fragment{}) {
		if err := result.Verify(); err != nil {
			return fmt.Errorf("%w of\n%s", err, result)
		}
	}
	return nil
}

func isNothing(p packet.Packet) bool { return p.IPv4 == nil && p.IPv6 == nil && p.Ethernet == nil }

// compare compares the flows and statistics after a scene.
func (p *path) compare(t *testing.T, s *scene, before map[string]lbmap.ServiceStats) {
	t.Helper()
	if s.flows != nil {
		if diff := cmp.Diff(s.flows, append([]string{}, p.dump()...)); diff != "" {
			t.Errorf("flows (-want +got)\n%s", diff)
		}
	}
	if err := errors.Join(p.checkFlows(), p.checkKeys()); err != nil {
		t.Error(err)
	}
	if s.stats == nil {
		return
	}
	for name, now := range p.serviceStats() {
		was := before[name]
		got := lbmap.ServiceStats{
			Connections: now.Connections - was.Connections, Rejected: now.Rejected - was.Rejected,
			Dropped: now.Dropped - was.Dropped, Raced: now.Raced - was.Raced,
		}
		if got != s.stats[name] {
			t.Errorf("Service %s: %+v, want %+v", name, got, s.stats[name])
		}
	}
}

// serviceStats returns the statistics by Service, of clients on the node and outside together.
func (p *path) serviceStats() map[string]lbmap.ServiceStats {
	tables := tablesOf(p.tier)
	all := map[string]lbmap.ServiceStats{}
	for id := range tables.Services {
		if tables.Services[id].State == lbmap.ServiceFree {
			continue
		}
		_, name, _ := tables.Services[id].SplitName()
		s, sum := &tables.ServiceStats[id], all[name]
		node, outside := s.Outcomes()
		both := node.Plus(outside)
		sum.Connections += both.Connections
		sum.Rejected += both.Rejected
		sum.Dropped += both.Dropped
		sum.Raced += s.Raced
		all[name] = sum
	}
	return all
}

// Packets of the tables:

func tcp(src, dst netip.AddrPort, flags packet.Flags) packet.Packet {
	return packet.NewTCP(src, dst, flags, nil)
}

func udp(src, dst netip.AddrPort) packet.Packet {
	return packet.NewUDP(src, dst, []byte("hello"))
}

// forwarded returns a packet after one hop.
func forwarded(p packet.Packet) packet.Packet { return withTTL(p, 63) }

func withTTL(p packet.Packet, ttl uint8) packet.Packet {
	p = p.Clone()
	if p.IPv4 != nil {
		p.IPv4.TTL = ttl
	} else {
		p.IPv6.HopLimit = ttl
	}
	return p
}

// back returns a packet in a frame to the sender of the original one.
func (p *path) back(q packet.Packet) packet.Packet {
	q.Ethernet = &packet.Ethernet{Dst: gatewayMAC, Src: p.mac}
	return q
}
