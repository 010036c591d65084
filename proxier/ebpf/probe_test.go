// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/lab"
)

// outcome counts the probes of the frontends for clients outside on an uplink.
type outcome struct {
	led, untried int
	failed       []string
}

func (o outcome) String() string {
	return fmt.Sprintf("%d led to an endpoint, %d not tried, failed: %q", o.led, o.untried, o.failed)
}

// tryAll probes every frontend for clients outside, of those in the table, on an uplink.
func (e *edge) tryAll(uplink string) (o outcome) {
	for _, c := range e.Table().All() {
		for i := range c.New.Frontends {
			f := &c.New.Frontends[i]
			if !f.Kind.External() {
				continue
			}
			node := e.at.Addr4
			if f.Addr.Addr().Is6() {
				node = e.at.Addr6
			}
			switch to, err := e.tier.Probe(uplink, c.New, f, node); {
			case err != nil:
				o.failed = append(o.failed, fmt.Sprintf("%s %s: %v", c.New.Name.Protocol, f.Addr, err))
			case to.IsValid():
				o.led++
			default:
				o.untried++
			}
		}
	}
	return o
}

// TestProbe: of two uplinks, packets are led to an endpoint on both, on the one whose route to an endpoint is there, or on none where programs
// do not know the port or the node's address, which alone is a failure. What waits to be written, is left to others or refuses clients is not tried. A probe leaves no
// flow.
func TestProbe(t *testing.T) {
	for name, opts := range map[string]Options{"tc": {}, "XDP": {Acceleration: datapath.Native}} {
		t.Run(name, func(t *testing.T) { testProbe(t, newEdge(t, opts)) })
	}
}

func testProbe(t *testing.T, e *edge) {
	const second = "eth1"
	e.addUplink(t, second)
	if err := e.tier.SetUplinks(t.Context(), uplinksOf(t, e.at)); err != nil {
		t.Fatal(err)
	}
	change := func(edit func(*v1.Service)) { e.OnServiceUpdate(nil, edgeService(edit)) }
	expect := func(what string, led, untried int) {
		t.Helper()
		e.sync(t)
		for _, uplink := range []string{lab.Uplink, second} {
			if o := e.tryAll(uplink); o.led != led || o.untried != untried || len(o.failed) > 0 {
				t.Errorf("%s, on %s: %s; want %d led, %d not tried", what, uplink, o, led, untried)
			}
		}
	}
	const all = 8 // TCP and UDP, IPv4 and IPv6, NodePort and load balancer IP
	expect("no endpoint", 0, all)
	e.use(t, e.here)
	expect("an endpoint on this node", all, 0)
	e.use(t, e.there)
	expect("one on another", all, 0)
	local := func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal }
	change(local)
	expect("policy Local without a local endpoint", 0, all)
	change(func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.1.0.0/16", "2001:db8:7::/48"} })
	expect("ranges", all, 0)
	change(func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"127.0.0.0/8", "::1/128"} })
	expect("ranges that no client is in", all/2, all/2)
	change(func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP })
	expect("affinity", all, 0)
	change(nil)
	at := e.at.Addr4
	e.UpdatePolicy(proxier.Policy{NodePorts: proxier.NodePortSelector{Primary: true}}, func(known *proxier.Facts) {
		known.Firewalls = []proxier.Firewall{{Where: "a chain"}}
	})
	e.use(t, e.here)
	expect("left to rules, as a firewall forwards only connections that netfilter translates", 0, all)
	policy := proxier.Policy{NodePorts: proxier.NodePortSelector{CIDRs: []netip.Prefix{netip.PrefixFrom(besides, 32), netip.MustParsePrefix("::/0")}}}
	e.UpdatePolicy(policy, func(known *proxier.Facts) { known.Firewalls = nil })
	expect("no NodePorts at the address", all-2, 2)
	policy.NodePorts, policy.Forwarding = proxier.NodePortSelector{Primary: true}, proxier.DSR
	e.UpdatePolicy(policy, func(*proxier.Facts) {})
	e.use(t, e.there)
	e.tier.writer.SetDirect(map[netip.Addr]struct{}{e.there.Addr4: {}, e.there.Addr6: {}})
	expect("direct server return", all, 0)
	policy.Forwarding = proxier.UnsetForwarding
	e.UpdatePolicy(policy, func(*proxier.Facts) {})
	expect("none", all, 0)

	// Another Service has the number of the NodePort at the node's own address.
	other := edgeService(func(s *v1.Service) {
		s.Name, s.UID = "other", "other"
		s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.ExternalIPs = "10.96.0.77", []string{"10.96.0.77"}, []string{at.String()}
		s.Status.LoadBalancer.Ingress = nil
		s.Spec.Type, s.Spec.Ports = v1.ServiceTypeClusterIP, []v1.ServicePort{{Name: "p", Port: nodePort, Protocol: v1.ProtocolTCP}}
	})
	e.OnServiceAdd(other)
	expect("a NodePort that another Service has at this address", all-1, 2)
	e.OnServiceDelete(other)
	expect("none", all, 0)

	broken := func(what string, on map[string]int) {
		t.Helper()
		e.connections(t) // ends flows: a probe of UDP from the port of one before would be part of its flow
		for _, uplink := range []string{lab.Uplink, second} {
			if o := e.tryAll(uplink); o.led != all-on[uplink] || len(o.failed) != on[uplink] {
				t.Errorf("%s, on %s: %s; want %d failed", what, uplink, o, on[uplink])
			}
		}
	}
	rule := func(command string) {
		t.Helper()
		for _, family := range []string{"-4", "-6"} {
			if out, err := e.at.Command(t.Context(), "ip", family, "rule", command, "iif", second, "pref", "1", "prohibit").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
	}
	// Programs cannot help that, and do not fail.
	unrouted := func(what string, led map[string]int) {
		t.Helper()
		for uplink, led := range led {
			if o := e.tryAll(uplink); o.led != led || o.untried != all-led || len(o.failed) > 0 {
				t.Errorf("%s, on %s: %s; want %d led, and no failure", what, uplink, o, led)
			}
		}
	}
	rule("add")
	unrouted("no route for what comes in by one uplink", map[string]int{lab.Uplink: all, second: 0})
	rule("del")
	for _, kind := range []string{"unreachable", "blackhole"} {
		route := func(command string) {
			t.Helper()
			for _, to := range []string{e.there.Addr4.String() + "/32", e.there.Addr6.String() + "/128"} {
				if out, err := e.at.Command(t.Context(), "ip", "route", command, kind, to).CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
		}
		route("add")
		unrouted(kind+" route to the endpoint", map[string]int{lab.Uplink: 0, second: 0})
		route("del")
	}
	broken("none", nil)

	ports := e.tier.maps["tdm_port"]
	word, bits := uint32(lbPort/64), uint64(0)
	if err := ports.Lookup(word, &bits); err != nil {
		t.Fatal(err)
	}
	if err := ports.Put(word, uint64(0)); err != nil {
		t.Fatal(err)
	}
	broken("programs that do not know a port", map[string]int{lab.Uplink: 2, second: 2})
	if err := ports.Put(word, bits); err != nil {
		t.Fatal(err)
	}
	if err := e.tier.maps["tdm_local"].Delete(lbmap.FromAddr(at)); err != nil {
		t.Fatal(err)
	}
	broken("programs that do not know an address of the node", map[string]int{lab.Uplink: 2, second: 2})
	if text := strings.Join(e.tryAll(second).failed, "\n"); !strings.Contains(text, "TCP 0.0.0.0:30080: its program does not forward a packet from 192.0.2.1:") {
		t.Error(text)
	}
	e.RequestFull()
	expect("a full sync", all, 0)
	if e.connections(t) == 0 || e.tier.flowTable.Used() != 0 {
		t.Errorf("no connections, or %d flows are left", e.tier.flowTable.Used())
	}

	// The table is ahead of the maps.
	e.setPods(e.here)
	added := edgeService(func(s *v1.Service) {
		s.Name, s.UID, s.Spec.ClusterIP, s.Spec.ClusterIPs = "added", "added", "10.96.0.78", []string{"10.96.0.78"}
		s.Status.LoadBalancer.Ingress[0].IP = "203.0.113.78"
		s.Spec.Ports = []v1.ServicePort{{Name: "p", Port: lbPort, NodePort: nodePort + 1, Protocol: v1.ProtocolTCP}}
	})
	e.OnServiceAdd(added)
	for _, slice := range slicesOf("added", e.here) {
		e.OnEndpointSliceAdd(slice)
	}
	e.Table().Apply(e.Tracker().Take())
	if o := e.tryAll(second); o.led != all || o.untried != 2 || len(o.failed) > 0 {
		t.Errorf("what waits to be written: %s", o)
	}
}
