// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"iter"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// tools of this machine. To find them takes longer than most of the rest.
var tools = sync.OnceValues(func() (*xtables.Tools, error) { return xtables.New(xtables.NFT) })

// needs skips a test on a kernel that does not support the tier, and says what is missing.
func needs(t testing.TB) Options {
	t.Helper()
	found, err := tools()
	if err != nil {
		lab.SkipOrFail(t, err)
	}
	opts := Options{Tools: found, StrictARP: true}
	if err := lab.NewT(t).Node("node1").Do(func() error { return CanUse(t.Context(), opts) }); err != nil {
		lab.SkipOrFailModule(t, err)
	}
	return opts
}

// onNode opens the tier on a node of a lab.
func onNode(t testing.TB, n *lab.Node, opts Options) *Tier {
	t.Helper()
	opts.Reporter = proxier.ReporterFunc(func(p proxier.Problem) { t.Errorf("%+v", p) })
	opts.OpenRules = func(ctx context.Context, constant func(proxier.Family, *proxier.NodeRules) ConstantRules) (Rules, error) {
		return iptables.Open(ctx, iptables.Options{
			Tools: opts.Tools.(iptables.Tools), Reporter: opts.Reporter,
			Extra: func(f proxier.Family, node *proxier.NodeRules) iptables.Extra { return extraRules(constant(f, node)) },
		})
	}
	var tier *Tier
	err := n.Do(func() (err error) {
		tier, err = Open(context.Background(), opts)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return tier
}

// TestScenarios plays the scenarios on real traffic.
func TestScenarios(t *testing.T) {
	opts := needs(t)
	list, err := scenarios.All()
	if err != nil {
		t.Fatal(err)
	}
	var plays []live.Staging
	served, all := 0, 0
	for _, s := range list {
		here, calls := live.CountServed(t, s, &scenarioTier{t: t, name: s.Name})
		served, all = served+here, all+calls
		if here > 0 {
			plays = append(plays, live.Staging{
				Name: s.Name, Scenario: s, Network: lab.Options{PortsInTurn: true},
				Tier: func(t *testing.T) live.Tier { return &scenarioTier{t: t, name: s.Name, opts: opts} },
			})
		}
	}
	live.PlayAll(t, plays)
	t.Logf("%d of %d calls in %d scenarios", served, all, len(list))
	// The kernel treats a few known calls differently.
	if left := all - served; left != 11 && lab.SCTPAvailable() == nil {
		t.Errorf("%d calls were not made", left)
	}
}

// TestGuarded plays some scenarios on nodes with strict settings.
func TestGuarded(t *testing.T) {
	opts := needs(t)
	if err := live.Guarded.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	list, err := scenarios.All()
	if err != nil {
		t.Fatal(err)
	}
	var plays []live.Staging
	for _, s := range list {
		switch s.Name {
		case "s41-no-endpoints", "s43-pod-short-cut", "s46-external-cluster", "s48-source-ranges", "s50-cluster-ip-from-outside", "s51-hairpin", "s72-udp-node-port", "s80-sctp":
			plays = append(plays, live.Staging{
				Name: s.Name, Scenario: s, Network: lab.Options{Nodes: live.Guarded, PortsInTurn: true},
				Tier: func(t *testing.T) live.Tier { return &scenarioTier{t: t, name: s.Name, opts: opts} },
			})
		}
	}
	live.PlayAll(t, plays)
}

// scenarioTier starts the tier on the nodes of a scenario.
type scenarioTier struct {
	t    *testing.T
	name string // of the scenario
	opts Options
	// nodes on which the tier was started, and their known collisions.
	nodes    []*lab.Node
	collided map[half]bool
}

// refused are calls to other ports of a virtual server's address. The address is local on each
// node, so the node refuses such calls instead of forwarding them.
var refused = map[string][]string{
	"s05-external-ip":               {"203.0.113.10:81"},
	"s06-shared-load-balancer-ip":   {"203.0.113.10:80"},
	"s12-node-port-at-a-cluster-ip": {"203.0.113.10:30080"},
	"s12-service-cidrs-unknown":     {"10.96.0.10:81", "10.97.0.10:81"},
}

func (s *scenarioTier) Start(n *lab.Node) (proxier.Tier, func(), error) {
	tier := onNode(s.t, n, s.opts)
	if !slices.Contains(s.nodes, n) {
		s.nodes = append(s.nodes, n)
	}
	s.t.Cleanup(func() {
		if s.t.Failed() {
			out, _ := n.Command(context.Background(), "sh", "-c", "iptables-save; ipset save; ipvsadm -Ln; ipvsadm -Lnc; conntrack -L; ip addr show dev kube-ipvs0").CombinedOutput()
			s.t.Logf("%s:\n%s", n.Name, out)
		}
	})
	flows := staleudp.New(staleudp.Options{Table: nodeTable{n}})
	return staleudp.Beside(tier, flows), func() { tier.Close() }, nil
}

// nodeTable is the conntrack of a node.
type nodeTable struct{ at *lab.Node }

func (t nodeTable) Flows(ctx context.Context, f proxier.Family) iter.Seq2[conntrack.Flow, error] {
	return func(yield func(conntrack.Flow, error) bool) {
		_ = t.at.Do(func() error {
			conntrack.Kernel{}.Flows(ctx, f)(yield)
			return nil
		})
	}
}

func (t nodeTable) Delete(ctx context.Context, flows []conntrack.Flow) (n int, err error) {
	err = t.at.Do(func() error {
		n, err = conntrack.Kernel{}.Delete(ctx, flows)
		return err
	})
	return n, err
}

// Intercepts implements live.Interceptor.
func (s *scenarioTier) Intercepts(p scenarios.Probe) error {
	if slices.Contains(refused[s.name], p.To.String()) {
		return errors.New("the address is local on the node, which refuses other ports")
	}
	return nil
}

func (s *scenarioTier) Serves(e *proxier.Explanation) error {
	switch {
	case e.Frontend != nil && e.Frontend.Kind == proxier.HostIP && e.Flow.Destination.Addr().IsLoopback():
		return errors.New("rules do not serve a hostIP that is a loopback address")
	case e.Flow.Destination.Addr() == netip.IPv6Loopback() && e.Frontend != nil:
		return errors.New("IPv6 has no route_localnet")
	case e.Flow.Protocol == proxier.UDP && e.Flow.Device == "" && e.Outcome == proxier.Rejected:
		return errors.New("the kernel returns EPERM to this host if it rejects a datagram")
	}
	return nil
}

// extraRules are the constant rules of mode ipvs, for the tier that writes them.
func extraRules(c ConstantRules) (extra iptables.Extra) {
	for _, chain := range c.Before {
		extra.Before = append(extra.Before, iptables.Chain(chain))
	}
	for _, chain := range c.Chains {
		extra.Chains = append(extra.Chains, iptables.Chain(chain))
	}
	for _, jump := range c.Jumps {
		extra.Jumps = append(extra.Jumps, iptables.Jump(jump))
	}
	return extra
}
