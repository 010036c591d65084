// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"os"
	"testing"

	"github.com/tandem-proxy/tandem/conntrack"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
	"github.com/tandem-proxy/tandem/xtables"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// onNode opens the tier on a node of a lab. A kernel that cannot carry it skips the test,
// and what it lacks is told.
func onNode(t testing.TB, n *lab.Node, opts Options) *Tier {
	t.Helper()
	if opts.Rules.Tools == nil {
		tools, err := xtables.New(xtables.NFT)
		if err != nil {
			lab.SkipOrFail(t, err)
		}
		opts.Rules.Tools = tools
	}
	if opts.Reporter == nil {
		opts.Reporter = proxier.ReporterFunc(func(p proxier.Problem) { t.Errorf("%+v", p) })
		opts.Rules.Reporter = opts.Reporter
	}
	var tier *Tier
	err := n.Do(func() (err error) {
		if err := CanUse(context.Background(), opts); err != nil {
			return fmt.Errorf("%w: %w", errMissing, err)
		}
		tier, err = Open(context.Background(), opts)
		return err
	})
	if errors.Is(err, errMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return tier
}

var errMissing = errors.New("missing")

// TestScenarios plays the scenarios on real traffic.
func TestScenarios(t *testing.T) {
	onNode(t, lab.NewT(t).Node("node1"), Options{})
	list, err := scenarios.All()
	if err != nil {
		t.Fatal(err)
	}
	var plays []live.Staging
	carried, all := 0, 0
	for _, s := range list {
		here, calls := live.Carried(t, s, &scenarioTier{t: t})
		carried, all = carried+here, all+calls
		if here > 0 {
			plays = append(plays, live.Staging{Name: s.Name, Scenario: s, Tier: func(t *testing.T) live.Tier { return &scenarioTier{t: t} }})
		}
	}
	live.PlayAll(t, plays)
	t.Logf("%d of %d calls in %d scenarios", carried, all, len(list))
}

// scenarioTier starts the tier on the nodes of a scenario.
type scenarioTier struct {
	t *testing.T
}

func (s *scenarioTier) Start(n *lab.Node) (proxier.Tier, func(), error) {
	tier := onNode(s.t, n, Options{})
	flows := conntrack.New(conntrack.Options{Table: nodeTable{n}})
	return conntrack.Beside(tier, flows), func() { tier.Close() }, nil
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

func (s *scenarioTier) Carries(e *proxier.Explanation) error {
	switch {
	case e.Flow.Destination.Addr() == netip.IPv6Loopback() && e.Frontend != nil:
		return errors.New("IPv6 has no route_localnet")
	case e.Flow.Protocol == proxier.UDP && e.Flow.Device == "" && e.Outcome == proxier.Rejected:
		return errors.New("the kernel tells this host of datagrams that it rejects by EPERM")
	}
	return nil
}
