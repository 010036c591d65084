// SPDX-License-Identifier: Apache-2.0

package nodefacts

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier"
)

func mustNew(t *testing.T, c *config.Config) *Settings {
	t.Helper()
	if err := c.Explain(c.Validate()); err != nil {
		t.Fatal(err)
	}
	gate, err := config.NewFeatureGate()
	if err != nil {
		t.Fatal(err)
	}
	if err := gate.SetFromMap(c.KubeProxy.FeatureGates); err != nil {
		t.Fatal(err)
	}
	s, err := New(c, gate)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// makeNode has the addresses in words: "InternalIP=10.0.0.1".
func makeNode(addresses ...string) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", Labels: map[string]string{v1.LabelTopologyZone: "z1"}}}
	for _, text := range addresses {
		kind, address, _ := strings.Cut(text, "=")
		n.Status.Addresses = append(n.Status.Addresses, v1.NodeAddress{Type: v1.NodeAddressType(kind), Address: address})
	}
	return n
}

// C40.
func TestNodeIPs(t *testing.T) {
	for _, test := range []struct {
		name, bind string
		addresses  []string
		want       string
		unknown    bool
	}{
		{name: "dual stack", addresses: []string{"Hostname=node1", "InternalIP=172.18.0.1", "InternalIP=fd00:18::1"}, want: "172.18.0.1 fd00:18::1"},
		{name: "the first of each family", addresses: []string{"InternalIP=fd00:18::1", "InternalIP=172.18.0.1", "InternalIP=172.18.0.2", "InternalIP=fd00:18::2"}, want: "172.18.0.1 fd00:18::1"},
		{name: "internal before external", addresses: []string{"ExternalIP=203.0.113.1", "InternalIP=172.18.0.1", "ExternalIP=2001:db8::1"}, want: "172.18.0.1 2001:db8::1"},
		{name: "one family", addresses: []string{"InternalIP=172.18.0.1"}, want: "172.18.0.1 ::1"},
		{name: "bound", bind: "10.0.0.1", addresses: []string{"InternalIP=172.18.0.1", "InternalIP=fd00:18::1"}, want: "10.0.0.1 fd00:18::1"},
		{name: "bound IPv6", bind: "fd00::1", addresses: []string{"InternalIP=172.18.0.1", "InternalIP=fd00:18::1"}, want: "172.18.0.1 fd00::1"},
		{name: "unspecified", bind: "::", addresses: []string{"InternalIP=172.18.0.1"}, want: "172.18.0.1 ::1"},
		{name: "bound, no address", bind: "10.0.0.1", want: "10.0.0.1 ::1"},
		{name: "no address", want: "127.0.0.1 ::1", unknown: true},
		{name: "no address that parses", addresses: []string{"InternalIP=here", "InternalIP="}, want: "127.0.0.1 ::1", unknown: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := config.New()
			if test.bind != "" {
				c.KubeProxy.BindAddress = test.bind
			}
			s := mustNew(t, c)
			f := s.Facts()
			s.FromNode(makeNode(test.addresses...), &f)
			if got := fmt.Sprint(f.NodeIPs[proxier.IPv4], " ", f.NodeIPs[proxier.IPv6]); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
			if KnowsNodeIP(&f) == test.unknown {
				t.Errorf("known: %v", !test.unknown)
			}
			if f.Zone != "z1" {
				t.Errorf("zone %q", f.Zone)
			}
		})
	}
}

// C41.
func TestDetector(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*config.Config)
		cidrs  []string // of the Node
		want   string
	}{
		{name: "nothing", change: func(*config.Config) {}, cidrs: []string{"10.244.1.0/24"}, want: "[]  false"},
		{name: "ClusterCIDR by default", change: func(c *config.Config) { c.KubeProxy.ClusterCIDR = "10.244.9.9/16" }, want: "[10.244.0.0/16]  false"},
		{
			name: "ClusterCIDR of both families",
			change: func(c *config.Config) {
				c.KubeProxy.DetectLocalMode, c.KubeProxy.ClusterCIDR = config.LocalModeClusterCIDR, "10.244.0.0/16,fd00:10:244::/48"
			},
			want: "[10.244.0.0/16 fd00:10:244::/48]  false",
		},
		{
			name: "NodeCIDR", change: func(c *config.Config) {
				c.KubeProxy.DetectLocalMode, c.KubeProxy.ClusterCIDR = config.LocalModeNodeCIDR, "10.0.0.0/8"
			},
			cidrs: []string{"10.244.1.0/24", "fd00:10:244:1::/64", "10.245.1.0/24"}, want: "[10.244.1.0/24 fd00:10:244:1::/64]  false",
		},
		{name: "NodeCIDR without any", change: func(c *config.Config) { c.KubeProxy.DetectLocalMode = config.LocalModeNodeCIDR }, cidrs: []string{"x"}, want: "[]  false"},
		{
			name: "BridgeInterface", change: func(c *config.Config) {
				c.KubeProxy.DetectLocalMode, c.KubeProxy.DetectLocal.BridgeInterface = config.LocalModeBridgeInterface, "cni0"
			},
			cidrs: []string{"10.244.1.0/24"}, want: "[] cni0 false",
		},
		{
			name: "InterfaceNamePrefix", change: func(c *config.Config) {
				c.KubeProxy.DetectLocalMode, c.KubeProxy.DetectLocal.InterfaceNamePrefix = config.LocalModeInterfaceNamePrefix, "cali"
			},
			want: "[] cali true",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := config.New()
			test.change(c)
			s := mustNew(t, c)
			f, node := s.Facts(), makeNode()
			node.Spec.PodCIDRs = test.cidrs
			s.FromNode(node, &f)
			if got := fmt.Sprint(f.Pods.CIDRs, " ", f.Pods.Interface, " ", f.Pods.InterfacePrefix); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

// A Node says nothing of addresses and ServiceCIDRs.
func TestFromNodeLeavesTheRest(t *testing.T) {
	f := proxier.Facts{LocalAddrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}
	mustNew(t, config.New()).FromNode(makeNode(), &f)
	if len(f.LocalAddrs) != 1 || len(f.ServiceCIDRs) != 1 {
		t.Errorf("got %+v", f)
	}
}

// Other settings, with the Node that is known or with none.
func TestRevise(t *testing.T) {
	settings := func(change func(*config.Config)) *Settings {
		c := config.New()
		change(c)
		return mustNew(t, c)
	}
	nodeCIDR := settings(func(c *config.Config) { c.KubeProxy.DetectLocalMode = config.LocalModeNodeCIDR })
	clusterCIDR := settings(func(c *config.Config) { c.KubeProxy.ClusterCIDR = "10.244.0.0/16" })
	bridge := settings(func(c *config.Config) {
		c.KubeProxy.DetectLocalMode, c.KubeProxy.DetectLocal.BridgeInterface = config.LocalModeBridgeInterface, "cni0"
	})
	node := makeNode("InternalIP=172.18.0.1")
	node.Spec.PodCIDRs = []string{"10.244.1.0/24"}
	for _, test := range []struct {
		name string
		to   *Settings
		node *v1.Node
		want string
	}{
		{"to the Node's ranges", nodeCIDR, node, "[10.244.1.0/24]  172.18.0.1 z1"},
		{"to those of a Node that is not known", nodeCIDR, nil, "[]  127.0.0.1 z9"},
		{"to a range", clusterCIDR, node, "[10.244.0.0/16]  172.18.0.1 z1"},
		{"to a device", bridge, node, "[] cni0 172.18.0.1 z1"},
	} {
		for _, before := range []*Settings{nodeCIDR, clusterCIDR, bridge} {
			f := before.Facts()
			f.Zone, f.LocalAddrs = "z9", []netip.Addr{netip.MustParseAddr("10.0.0.1")}
			if test.node != nil {
				before.FromNode(test.node, &f)
			}
			test.to.Revise(test.node, &f)
			if got := fmt.Sprint(f.Pods.CIDRs, " ", f.Pods.Interface, " ", f.NodeIPs[proxier.IPv4], " ", f.Zone); got != test.want || len(f.LocalAddrs) != 1 {
				t.Errorf("%s: %s, want %s; local addresses %v", test.name, got, test.want, f.LocalAddrs)
			}
		}
	}
}

func TestPolicy(t *testing.T) {
	c := config.New()
	byDefault := proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}, Balancing: proxier.Balancing{Algorithm: proxier.Random}, Forwarding: proxier.SNAT}
	if d := cmp.Diff(byDefault, mustNew(t, c).Policy); d != "" {
		t.Errorf("by default (-want +got):\n%s", d)
	}
	c.KubeProxy.IPTables.MasqueradeAll = true
	*c.KubeProxy.IPTables.LocalhostNodePorts = false
	c.KubeProxy.NodePortAddresses = []string{"primary", "10.0.0.0/8"}
	c.KubeProxy.FeatureGates = map[string]bool{"AllowServiceExternalIPs": false}
	c.Tandem.StrictSourceRanges = true
	c.Tandem.EBPF.ResetRemovedBackends = true
	lb := &c.Tandem.LoadBalancer
	lb.Algorithm, lb.MaglevTableSize, lb.MaglevSeed, lb.Mode = "maglev", 509, 7, "hybrid"
	want := proxier.Policy{
		MasqueradeAll: true, IgnoreExternalIPs: true, StrictSourceRanges: true, KeepTCP: true,
		NodePorts: proxier.NodePortSelector{Primary: true, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}},
		Balancing: proxier.Balancing{Algorithm: proxier.Maglev, TableSize: 509, Seed: 7}, Forwarding: proxier.Hybrid,
	}
	s := mustNew(t, c)
	if d := cmp.Diff(want, s.Policy, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" || len(s.Warnings) > 0 {
		t.Errorf("(-want +got):\n%s\nwarnings %q", d, s.Warnings)
	}
	c.KubeProxy.NodePortAddresses = []string{"10.0.0.0/8"}
	if s := mustNew(t, c); len(s.Warnings) != 1 || !strings.Contains(s.Warnings[0], "IPv6") {
		t.Errorf("warnings %q", s.Warnings)
	}
}

func TestServiceCIDRs(t *testing.T) {
	var s ServiceCIDRs
	var facts proxier.Facts
	feed := s.Handler(func(change func(*proxier.Facts)) { change(&facts) })
	for _, step := range []struct {
		name  string
		cidrs []string
		want  string
	}{
		{"kubernetes", []string{"10.96.0.0/16", "fd00:10:96::/112"}, "[10.96.0.0/16 fd00:10:96::/112]"},
		{"more", []string{"10.90.0.1/16", "10.96.0.0/16", "x"}, "[10.90.0.0/16 10.96.0.0/16 fd00:10:96::/112]"},
		{"kubernetes", nil, "[10.90.0.0/16 10.96.0.0/16]"}, // another object still has one of them
		{"more", nil, "[]"},
		{"unknown", nil, "[]"},
	} {
		feed(step.name, step.cidrs)
		if got := fmt.Sprint(facts.ServiceCIDRs); got != step.want {
			t.Errorf("after %+v: %s", step, got)
		}
	}
}
