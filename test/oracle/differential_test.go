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
	flowsFlag = flag.Int("oracle.flows", 200_000, "flows that TestDifferential asks for in all; TestDifferentialLarge asks for few of them")
	seedFlag  = flag.Uint64("oracle.seed", 0, "seed of the first world; 0 draws one")
	countFlag = flag.Bool("oracle.count", false, "count all disagreements instead of stopping at the first one")
)

// world is a random history and random questions about it.
type world struct {
	seed    uint64
	proxied bool // driven through a proxier
	h       history
	flows   int
	asked   proxier.Flow // last
	found   *failure
}

// worldOptions are what worlds of a test have in common.
type worldOptions struct {
	steps, flows int // flows of each step
	events       events
	spoil        wrongAnswer
	// count goes on after a disagreement and tells it.
	count func(*failure)
}

// runWorld plays a world until it is through or a disagreement is found.
func runWorld(seed uint64, o worldOptions) (w *world) {
	g := newGenerator(seed)
	w = &world{seed: seed, proxied: g.chance(0.25)}
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
	p := newPlayer(w.h, w.proxied)
	for i := range o.steps {
		st := g.next(o.events, p, i == 0)
		w.h.steps = append(w.h.steps, st)
		p.play(st)
		c := p.cluster()
		if failed(checkState(p.s, c)) || g.chance(0.2) && failed(checkDump(p.s, c, seed)) {
			return w
		}
		frontends := c.Frontends()
		for range o.flows {
			w.flows++
			w.asked = g.flow(frontends, c)
			if failed(checkFlow(p.s, c, w.asked, o.spoil)) {
				return w
			}
		}
	}
	return w
}

// TestDifferential plays random histories to the table and compares what it
// says with the oracle: about flows, frontends and health checks, and that what
// it reports as changed is what did. For a night of it:
//
//	go test ./test/oracle -timeout=0 -oracle.flows=1000000000
func TestDifferential(t *testing.T) {
	t.Parallel()
	runWorlds(t, *flowsFlag, worldOptions{steps: 15, flows: 60, events: (*generator).events})
}

// TestDifferentialLarge has a Service with thousands of endpoints, for which
// the table keeps the endpoints of all slices merged.
func TestDifferentialLarge(t *testing.T) {
	t.Parallel()
	runWorlds(t, *flowsFlag/200, worldOptions{steps: 30, flows: 3, events: (*generator).largeEvents})
}

func runWorlds(t *testing.T, flows int, o worldOptions) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	var (
		mu          sync.Mutex
		next, asked int
		counts      = map[string]int{}
		failed      *world
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
		if failed == nil && w.found != nil {
			failed = w
		}
	}
	start := time.Now()
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for seed, ok := take(); ok; seed, ok = take() {
				done(runWorld(seed, o))
			}
		})
	}
	wg.Wait()
	took := time.Since(start).Seconds()
	t.Logf("%d flows of worlds from seed %d in %.1f s: %.0f/s", asked, seed, took, float64(asked)/took)
	if len(counts) > 0 {
		t.Errorf("disagreements: %v", counts)
	}
	if failed != nil {
		report(t, failed, o)
	}
}
