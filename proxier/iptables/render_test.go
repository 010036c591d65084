// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
	"github.com/tandem-proxy/tandem/test/golden"
)

// renderCases are typical Services, each alone on a node.
var renderCases = []struct {
	name      string
	service   *v1.Service
	endpoints []string
	facts     func(*proxier.Facts)
	policy    proxier.Policy
}{
	{name: "cluster-ip", service: service(0), endpoints: []string{"10.244.1.5", "10.244.2.5", "10.244.2.6"}},
	{name: "affinity", service: service(0, sticky), endpoints: []string{"10.244.1.5", "10.244.2.5"}},
	{name: "node-port-local", service: service(0, nodePort(30080), externalLocal), endpoints: []string{"10.244.1.5", "10.244.2.5"}},
	{name: "health-check", service: service(0, balanced(0), externalLocal, healthCheck(32000)), endpoints: []string{"10.244.2.5"}},
	{name: "node-port-local-none-here", service: service(0, nodePort(30080), externalLocal), endpoints: []string{"10.244.2.5"}},
	{name: "ranges", service: service(0, balanced(0, "198.51.100.0/24", "203.0.113.0/24")), endpoints: []string{"10.244.1.5"}},
	{name: "ranges-local", service: service(0, balanced(0, "198.51.100.0/24"), externalLocal), endpoints: []string{"10.244.1.5"}},
	{name: "external-ip", service: service(0, func(s *v1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.7"} }), endpoints: []string{"10.244.1.5"}},
	{name: "no-endpoints", service: service(0, balanced(0))},
	{name: "internal-local-none-here", service: service(0, internalLocal), endpoints: []string{"10.244.2.5"}},
	{name: "unserved", service: service(0), facts: func(f *proxier.Facts) { f.ServiceCIDRs = iptablestest.ServiceCIDRs }},
	{name: "detector-interface", service: service(0, nodePort(30080), externalLocal), endpoints: []string{"10.244.1.5"},
		facts: func(f *proxier.Facts) { f.Pods = proxier.Detector{Interface: "cni", InterfacePrefix: true} }},
	{name: "no-detector", service: service(0, nodePort(30080), externalLocal), endpoints: []string{"10.244.1.5"},
		facts: func(f *proxier.Facts) { f.Pods = proxier.Detector{} }},
	{name: "masquerade-all", service: service(0), endpoints: []string{"10.244.1.5"}, policy: proxier.Policy{MasqueradeAll: true}},
	{name: "ipv6", service: service(0, nodePort(30080), sticky, func(s *v1.Service) {
		s.Spec.ClusterIP, s.Spec.ClusterIPs = "fd00:10:96::1", []string{"fd00:10:96::1"}
		s.Spec.ExternalIPs = []string{"2001:db8:203:113::1"}
	}), endpoints: []string{"fd00:10:244:1::5", "fd00:10:244:2::5"}},
	{name: "ipv6-no-endpoints", service: service(0, nodePort(30080), func(s *v1.Service) {
		s.Spec.ClusterIP, s.Spec.ClusterIPs = "fd00:10:96::1", []string{"fd00:10:96::1"}
	})},
	{name: "loopback-node-ports", service: service(0, nodePort(30080)), endpoints: []string{"10.244.1.5"},
		policy: proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}}},
	{name: "primary-node-ports", service: service(0, nodePort(30080)), endpoints: []string{"10.244.1.5"},
		policy: proxier.Policy{NodePorts: proxier.NodePortSelector{Primary: true}}},
}

// TestRender compares all rules of typical Services with golden files.
func TestRender(t *testing.T) {
	for _, tc := range renderCases {
		t.Run(tc.name, func(t *testing.T) {
			facts := iptablestest.Facts
			if tc.facts != nil {
				tc.facts(&facts)
			}
			n := unstartedNode(t, newSimulated())
			n.Start(newSimulatedTier(n.options()), facts, tc.policy)
			n.OnServiceAdd(tc.service)
			if len(tc.endpoints) > 0 {
				n.OnEndpointSliceAdd(endpoints(0, tc.endpoints...))
			}
			n.MustSync()
			f := proxier.FamilyOf(netip.MustParseAddr(tc.service.Spec.ClusterIP))
			golden.Compare(t, tc.name+".rules", withoutCommon(t, n.Tools, f, strings.HasSuffix(tc.name, "node-ports")))
		})
	}
}

// common are the chains that are the same for all Services. They have their own golden file.
var common = []string{
	"nat PREROUTING", "nat INPUT", "nat OUTPUT", "nat POSTROUTING", "nat KUBE-POSTROUTING", "nat KUBE-MARK-MASQ",
	"filter KUBE-FORWARD", "filter KUBE-FIREWALL", "filter INPUT", "filter FORWARD", "filter OUTPUT",
}

// withoutCommon returns the rules of one Service; with nodePorts, also those that jump to chains of
// NodePorts.
func withoutCommon(t *testing.T, tools Tools, f proxier.Family, nodePorts bool) string {
	var b strings.Builder
	at := ""
	for line := range strings.Lines(saved(t, tools, f)) {
		if !strings.HasPrefix(line, " ") {
			at = strings.TrimSpace(line)
			continue
		}
		if table, chain, _ := strings.Cut(at, " "); !slices.Contains(common, at) && (nodePorts || !strings.Contains(line, "this must be the last rule")) && strings.TrimSpace(line) != toExternal {
			fmt.Fprintf(&b, "%s: -A %s %s", table, chain, strings.TrimLeft(line, " "))
		}
	}
	return b.String()
}

// TestRenderCommon compares the chains that all Services share with golden files, in both families.
func TestRenderCommon(t *testing.T) {
	n := unstartedNode(t, newSimulated())
	n.Start(newSimulatedTier(n.options()), iptablestest.Facts, proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}})
	n.MustSync()
	golden.Compare(t, "common.rules", saved(t, n.Tools, proxier.IPv4))
	golden.Compare(t, "common-ipv6.rules", saved(t, n.Tools, proxier.IPv6))
}
