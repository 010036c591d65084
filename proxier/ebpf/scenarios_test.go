// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// TestScenarios plays the scenarios with real traffic. Calls that the tier does not serve are left
// out, and logged. Scenarios with clients behind an uplink are played again with packets as on
// real devices and strict netfilter rules on the nodes, and some with programs attached by clsact. Those in which an endpoint
// on another node can get a packet are played with direct server return, of all or of TCP alone, and with XDP.
func TestScenarios(t *testing.T) {
	kernel.NeedsPrograms(t)
	list, err := scenarios.All()
	if err != nil {
		t.Fatal(err)
	}
	clsact := []string{"s05-external-ip", "s40-external-local", "s48-source-ranges", "s53-source-kept", "s63-affinity-of-hidden-clients",
		"s72-udp-node-port", "s88-restart"}
	var plays []live.Staging
	with := func(opts Options) func(*testing.T) live.Tier {
		return func(t *testing.T) live.Tier { return &scenarioTier{t: t, opts: opts} }
	}
	served, all, others, direct := 0, 0, 0, 0
	for _, s := range list {
		tier := &scenarioTier{}
		here, calls := live.CountServed(t, s, tier)
		served, all = served+here, all+calls
		if here > 0 {
			plays = append(plays, live.Staging{Name: s.Name, Scenario: s, Tier: with(Options{})})
		}
		if tier.outside > 0 {
			plays = append(plays, live.Staging{Name: s.Name + "/guarded", Scenario: s, Tier: with(Options{}), Network: lab.Options{Nodes: live.Guarded, NoOffload: true}})
		}
		if tier.direct > 0 {
			opts := Options{Dispatch: lbmap.Dispatch(direct % 3)}
			forwards := func(how proxier.Forwarding, opts Options) func(t *testing.T) live.Tier {
				return func(t *testing.T) live.Tier { return &directTier{scenarioTier{t: t, opts: opts}, s, how} }
			}
			xdp := opts
			xdp.Acceleration = datapath.Native
			accelerated := lab.Options{NoOffload: true, XDP: true}
			plays = append(plays,
				live.Staging{Name: s.Name + "/direct", Scenario: s, Tier: forwards(proxier.DSR, opts)},
				live.Staging{Name: s.Name + "/hybrid", Scenario: s, Tier: forwards(proxier.Hybrid, opts)},
				live.Staging{Name: s.Name + "/xdp", Scenario: s, Tier: with(Options{Acceleration: datapath.Native}), Network: accelerated},
				live.Staging{Name: s.Name + "/direct-xdp", Scenario: s, Tier: forwards(proxier.DSR, xdp), Network: accelerated})
			direct++
		}
		if slices.Contains(clsact, s.Name) {
			plays = append(plays, live.Staging{Name: s.Name + "/clsact", Scenario: s, Tier: with(Options{TC: tc.Clsact}), Network: lab.Options{Nodes: live.Guarded}})
			others++
		}
	}
	live.PlayAll(t, plays)
	t.Logf("%d of %d calls in %d scenarios, played %d times", served, all, len(list), len(plays))
	// docs/testing.md has these numbers. Update them when scenarios change.
	want := 790
	if lab.SCTPAvailable() == nil {
		want = 814 // calls over SCTP can be made, but are not served
	}
	if served != 781 || all != want {
		t.Errorf("%d of %d calls are served, want 781 of %d", served, all, want)
	}
	if direct < 20 {
		t.Errorf("%d plays by direct server return", direct)
	}
	if others != len(clsact) || len(plays) < len(list)*3/2 {
		t.Errorf("%d plays, %d by clsact", len(plays), others)
	}
}

// scenarioTier starts the tier on the nodes of a scenario.
type scenarioTier struct {
	t    *testing.T
	opts Options
	seen map[string]bool
	// outside counts the calls that arrive through an uplink, and direct those of them that can get an endpoint on another node.
	outside, direct int
}

// directTier is one with direct server return. All nodes take part from the first sync on.
type directTier struct {
	scenarioTier
	scenario *scenarios.Scenario
	how      proxier.Forwarding
}

func (s *directTier) Forwarding() proxier.Forwarding { return s.how }

func (s *directTier) Start(n *lab.Node) (proxier.Tier, func(), error) {
	tier, end, err := s.scenarioTier.Start(n)
	if err != nil {
		return nil, nil, err
	}
	cluster := proxier.Cluster{}
	for _, node := range s.scenario.Nodes {
		for family := range proxier.Families {
			cluster.Nodes = append(cluster.Nodes, s.scenario.Addr(node.Name, family))
			cluster.Pods = append(cluster.Pods, s.scenario.PodCIDR(node.Name, family))
		}
	}
	return ready{tier.(settled)}, end, tier.(settled).SetCluster(cluster)
}

// ready is a tier that knows after each Sync that other nodes take packets in IP packets.
type ready struct{ settled }

func (r ready) Sync(ctx context.Context, u proxier.Update) error {
	err := r.settled.Sync(ctx, u)
	peers := map[netip.Addr]struct{}{}
	for _, a := range r.writer.DirectPeers() {
		peers[a] = struct{}{}
	}
	r.writer.SetDirect(peers)
	return err
}

func (s *scenarioTier) Start(n *lab.Node) (proxier.Tier, func(), error) {
	if s.seen == nil {
		s.seen = map[string]bool{}
	}
	if !s.seen[n.Name] {
		s.seen[n.Name] = true
		s.t.Cleanup(func() {
			if err := cleanupOn(n); err != nil {
				s.t.Error(err)
			}
		})
	}
	tier, err := openOn(s.t, n, s.opts)
	if err != nil {
		return nil, nil, err
	}
	end := func() { _ = tier.Close() } // idempotent
	s.t.Cleanup(end)
	if err := tier.SetUplinks(s.t.Context(), uplinksOf(s.t, n)); err != nil {
		return nil, nil, err
	}
	return settled{tier}, end, nil
}

// settled is a tier whose Sync also closes sockets of removed backends before it returns.
type settled struct{ *Tier }

func (s settled) Sync(ctx context.Context, u proxier.Update) error {
	if err := s.Tier.Sync(ctx, u); err != nil {
		return err
	}
	_, err := s.sockets.CloseNow(ctx)
	return err
}

func (s *scenarioTier) Serves(e *proxier.Explanation) error {
	if err := live.SocketsCannot(e); err != nil {
		return err
	}
	switch {
	case e.Frontend == nil:
		return nil
	case e.Flow.Device == lab.Uplink:
		s.outside++
		if !e.Route.Set.Local() && slices.ContainsFunc(e.Endpoints, func(j proxier.Judgement) bool { return j.Remote && j.In(e.Route.Set) }) {
			s.direct++
		}
	}
	return (&Tier{}).Supports(e.Decision, e.Frontend)
}
