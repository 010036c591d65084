// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

// A changed policy has the same result as if it had been set from the start.
func TestPolicyChange(t *testing.T) {
	local := []netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("fd00:18::1")}
	nodeIPs := [Families]netip.Addr{local[0], local[2]}
	pods := Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/24")}}
	start := Facts{Zone: "z1", NodeIPs: nodeIPs, LocalAddrs: local, Pods: pods}
	states := []struct {
		policy Policy
		pods   Detector
	}{
		{Policy{}, pods},
		{Policy{MasqueradeAll: true}, pods},
		{Policy{NodePorts: NodePortSelector{Primary: true, Loopback: true}}, pods},
		{Policy{NodePorts: NodePortSelector{CIDRs: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}}, IgnoreExternalIPs: true}, Detector{}},
		{Policy{StrictSourceRanges: true}, Detector{Interface: "cni0"}},
		{Policy{KeepTCP: true}, pods},
	}
	build := func(policy Policy, pods Detector) (*Proxier, *recordingTier) {
		t.Helper()
		facts := start
		facts.Pods = pods
		tier := &recordingTier{}
		p, err := New(Options{NodeName: "node1", Tier: tier, Facts: facts, Policy: policy, Runner: DefaultRunnerOptions()})
		if err != nil {
			t.Fatal(err)
		}
		p.OnServiceAdd(makeService("a", func(s *v1.Service) {
			s.Spec.Type, s.Spec.ClusterIPs = v1.ServiceTypeLoadBalancer, []string{"10.96.0.1", "fd00:10:96::1"}
			s.Spec.Ports[0].NodePort, s.Spec.ExternalIPs = 30080, []string{"203.0.113.10"}
			s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24"}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.11"}, {IP: "2001:db8:203:113::11"}}
		}))
		p.OnServiceAdd(makeService("b", localPolicy, clusterIPs("10.96.0.2")))
		p.OnEndpointSliceAdd(makeSlice("1", "10.244.0.1 node=node1", "10.244.1.1 zone=z2", "10.244.1.2 terminating notready"))
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced()
		if err := p.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		return p, tier
	}
	for i, before := range states {
		for j, after := range states {
			p, tier := build(before.policy, before.pods)
			given := len(tier.updates)
			p.UpdatePolicy(after.policy, func(f *Facts) { f.Pods = after.pods })
			if err := p.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			fresh, _ := build(after.policy, after.pods)
			if d := cmp.Diff(fresh.table.Dump(), p.table.Dump()); d != "" {
				t.Errorf("from %d to %d (-from the start +changed):\n%s", i, j, d)
			}
			rules, want := p.table.NodeRules(), fresh.table.NodeRules()
			if !rules.Equal(&want) {
				t.Errorf("from %d to %d: rules %+v, want %+v", i, j, rules, want)
			}
			// The tier is given what differs, and nothing for what does not.
			old, _ := build(before.policy, before.pods)
			was := old.table.NodeRules()
			last := tier.updates[given]
			if told := last.NodeRules != nil; told == rules.Equal(&was) {
				t.Errorf("from %d to %d: told of the rules: %v", i, j, told)
			}
			if differs := old.table.Dump() != p.table.Dump(); differs && len(last.Changes) == 0 && last.NodeRules == nil || i == j && len(last.Changes) > 0 {
				t.Errorf("from %d to %d: %d changes", i, j, len(last.Changes))
			}
			// The next sync has nothing to do with it any more.
			if err := p.Sync(t.Context()); err != nil || len(tier.updates[given+1].Changes) > 0 || tier.updates[given+1].NodeRules != nil {
				t.Errorf("from %d to %d: again %+v, %v", i, j, tier.updates[given+1], err)
			}
			if p.policy != nil {
				t.Error("the next sync decides everything anew")
			}
		}
	}
}
