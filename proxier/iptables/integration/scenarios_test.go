// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
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

// TestScenarios plays the scenarios with real traffic, on both variants of the tools.
func TestScenarios(t *testing.T) {
	list, err := scenarios.All()
	if err != nil {
		t.Fatal(err)
	}
	var plays []live.Staging
	served, all := 0, 0
	for _, v := range variants {
		if _, err := xtables.New(v); err != nil {
			lab.SkipOrFail(t, err)
		}
		for _, s := range list {
			here, calls := live.CountServed(t, s, &scenarioTier{t: t})
			served, all = served+here, all+calls
			if here > 0 {
				tier := func(t *testing.T) live.Tier { return &scenarioTier{t: t, variant: v} }
				// A port that is used again soon is of a connection that conntrack still has, whose endpoint may be out of service by now.
				plays = append(plays, live.Staging{Name: fmt.Sprintf("%s/%s", s.Name, v), Scenario: s, Tier: tier, Network: lab.Options{PortsInTurn: true}})
			}
		}
	}
	live.PlayAll(t, plays)
	t.Logf("%d of %d calls in %d scenarios, played %d times", served, all, len(list), len(plays))
	// Rules cannot serve a few known calls.
	if left := all - served; left > 6*len(variants) {
		t.Errorf("%d calls were not made", left)
	}
}

// scenarioTier starts the tier on the nodes of a scenario.
type scenarioTier struct {
	t       *testing.T
	variant xtables.Variant
}

func (s *scenarioTier) Start(n *lab.Node) (proxier.Tier, func(), error) {
	tools, err := xtables.New(s.variant)
	if err != nil {
		return nil, nil, err
	}
	var tier *iptables.Tier
	err = n.Do(func() (err error) {
		tier, err = iptables.Open(context.Background(), iptables.Options{Tools: tools, Flows: staleudp.New(staleudp.Options{Table: conntrack.Kernel{}}), Reporter: proxier.ReporterFunc(func(p proxier.Problem) { s.t.Errorf("%+v", p) })})
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	return tier, func() { tier.Close() }, nil
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
