// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// TestScenarios plays the scenarios on real traffic. What no socket hook can do is
// left out, and logged.
func TestScenarios(t *testing.T) {
	list, err := scenarios.All()
	if err != nil {
		t.Fatal(err)
	}
	carried, all := 0, 0
	for _, s := range list {
		here, calls := live.Carried(t, s, &scenarioTier{t: t})
		carried, all = carried+here, all+calls
		if here > 0 {
			t.Run(s.Name, func(t *testing.T) { live.Play(t, s, &scenarioTier{t: t}) })
		}
	}
	t.Logf("%d of %d calls in %d scenarios", carried, all, len(list))
	if carried < 400 {
		t.Errorf("only %d calls were made", carried)
	}
}

// scenarioTier starts the tier on the nodes of a scenario.
type scenarioTier struct {
	t    *testing.T
	seen map[string]bool
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
	tier, err := openOn(n, Options{})
	if err != nil {
		return nil, nil, err
	}
	end := func() { _ = tier.Close() } // twice is once
	s.t.Cleanup(end)
	if err := tier.SetUplinks(uplinksOf(s.t, n)); err != nil {
		return nil, nil, err
	}
	return settled{tier}, end, nil
}

// settled is a tier whose syncs include what others wait for.
type settled struct{ *Tier }

func (s settled) Sync(ctx context.Context, u proxier.Update) error {
	if err := s.Tier.Sync(ctx, u); err != nil {
		return err
	}
	_, err := s.flows.closeNow(ctx)
	return err
}

func (s *scenarioTier) Carries(e *proxier.Explanation) error {
	switch {
	case e.Flow.Device != lab.Uplink && e.Flow.Device != "" && e.Origin != proxier.FromPod && e.Outcome != proxier.Pass:
		return errors.New("at its socket, a pod is a pod, whatever the detector says")
	case e.Flow.Device != lab.Uplink && e.Frontend != nil && e.Route.Source == proxier.Masquerade && e.Origin == proxier.FromPod:
		return errors.New("at its socket, a pod is not masqueraded")
	case e.Frontend != nil:
		return (&Tier{}).Supports(e.Decision, e.Frontend)
	}
	return nil
}
