// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

var (
	flowsFlag = flag.Int("oracle.flows", 200_000, "flows that TestDifferential asks for in all; others ask for few of them")
	seedFlag  = flag.Uint64("oracle.seed", 0, "seed of the first world; 0 draws one")
	countFlag = flag.Bool("oracle.count", false, "count all disagreements instead of stopping at the first one")
)

// Worlds are random histories and random questions about them. Disagreements with the
// oracle are reduced to a scenario.
type Worlds struct {
	// Share divides -oracle.flows: this many of them count as one flow.
	Share int
	// Steps of each history, and Flows after each of them.
	Steps, Flows int
	Events       Events
	// Tier, if set, makes a tier to be tested as well, behind a proxier. It must be
	// deterministic for a seed.
	Tier func(seed uint64) Tier

	spoil wrongAnswer
	// count, if set, is called for disagreements, which then do not end the run.
	count func(*failure)
}

// Tier is a tier that can check how it handles a flow.
type Tier interface {
	proxier.Tier
	// Check returns how the tier's handling of a flow differs from the answer.
	Check(c *Cluster, flow proxier.Flow, want *Answer) error
}

// world is one random history.
type world struct {
	seed    uint64
	proxied bool // driven through a proxier
	h       history
	flows   int
	asked   proxier.Flow // the last question
	found   *failure
}

// play plays a world until its end or a disagreement.
func (o *Worlds) play(seed uint64) (w *world) {
	g := newGenerator(seed)
	w = &world{seed: seed, proxied: g.chance(0.25) || o.Tier != nil}
	w.h.facts = g.facts()
	w.h.policy, w.h.settings = g.policy()
	failed := func(f *failure) bool {
		if f == nil {
			return false
		}
		if o.count != nil {
			o.count(f)
			return false
		}
		w.found = f
		return true
	}
	defer func() {
		if r := recover(); r != nil {
			failed(&failure{what: "panic", flow: w.asked, text: fmt.Sprintf("panic: %v\n%s", r, debug.Stack())})
		}
	}()
	d := w.defect(o)
	p := d.player()
	for i := range o.Steps {
		st := g.next(o.Events, p, i == 0)
		w.h.steps = append(w.h.steps, st)
		p.play(st)
		c := p.cluster()
		if failed(checkState(p.s, c)) || g.chance(0.2) && failed(checkDump(p.s, c, seed)) {
			return w
		}
		frontends := c.Frontends()
		for range o.Flows {
			w.flows++
			w.asked = g.flow(frontends, c)
			if failed(checkFlow(p.s, c, w.asked, o.spoil)) {
				return w
			}
		}
	}
	return w
}

// defect returns the disagreement of the world as a defect.
func (w *world) defect(o *Worlds) defect {
	d := defect{h: w.h, proxied: w.proxied, seed: w.seed, spoil: o.spoil, tier: o.Tier}
	if w.found != nil {
		d.what, d.flow = w.found.what, w.found.flow
	}
	return d
}

// Find plays at most the given number of worlds, and returns the first disagreement.
func (o Worlds) Find(worlds int) error {
	for seed := range uint64(worlds) {
		if w := o.play(seed); w.found != nil {
			return fmt.Errorf("world %d: %s: %s", seed, w.found.what, w.found.text)
		}
	}
	return nil
}

// Run plays worlds, and reports disagreements.
func (o Worlds) Run(t testing.TB) {
	t.Helper()
	seed, flows := *seedFlag, *flowsFlag/o.Share
	if testing.Short() {
		flows /= 10
	}
	if seed == 0 {
		seed = rand.Uint64()
	}
	var (
		mu                  sync.Mutex
		next, asked, states int
		counts              = map[string]int{}
		failed              *world
	)
	if *countFlag {
		o.count = func(f *failure) {
			mu.Lock()
			defer mu.Unlock()
			counts[f.what]++
		}
	}
	take := func() (uint64, bool) {
		mu.Lock()
		defer mu.Unlock()
		next++
		return seed + uint64(next-1), failed == nil && asked < flows
	}
	done := func(w *world) {
		mu.Lock()
		defer mu.Unlock()
		asked += max(w.flows, 1)
		states += len(w.h.steps)
		if failed == nil && w.found != nil {
			failed = w
		}
	}
	start := time.Now()
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for seed, ok := take(); ok; seed, ok = take() {
				done(o.play(seed))
			}
		})
	}
	wg.Wait()
	took := time.Since(start).Seconds()
	t.Logf("%d flows in %d states of worlds from seed %d in %.1f s: %.0f/s", asked, states, seed, took, float64(asked)/took)
	if len(counts) > 0 {
		t.Errorf("disagreements: %v", counts)
	}
	if failed != nil {
		report(t, failed, &o)
	}
}
