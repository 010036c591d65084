// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/packet"
)

var (
	packetCount = flag.Int("packets", 250000, "random packets in TestPackets")
	packetSeed  = flag.Uint64("packets.seed", 0, "the first sequence of TestPackets")
)

// perSequence is how many events a sequence has.
const perSequence = 800

// sequence is a cluster, and what then happens, each by its seed: events do not depend
// on one another, so that those that do not matter for a disagreement can be left out.
type sequence struct {
	cluster uint64
	events  []uint64
}

func newSequence(seed uint64) sequence {
	r := rand.New(rand.NewPCG(seed, 1))
	s := sequence{cluster: r.Uint64()}
	for range perSequence {
		s.events = append(s.events, r.Uint64())
	}
	return s
}

// disagreement is between program and model; other errors are those of the test.
type disagreement struct{ error }

func isDisagreement(err error) bool {
	_, is := errors.AsType[disagreement](err)
	return is
}

// player plays sequences on the node, and beside it on the model.
type player struct {
	*path
	randomCluster
	packets int
	seen    map[string]uint64 // packets by reason, of all sequences
	log     *strings.Builder  // what happened, for people; may be nil
}

func (p *player) note(format string, args ...any) {
	if p.log != nil {
		fmt.Fprintf(p.log, format+"\n", args...)
	}
}

// play returns the first disagreement; only on a thread of the node.
func (p *player) play(s sequence) error {
	p.fill(rand.New(rand.NewPCG(s.cluster, 2)), p)
	if err := p.sync(); err != nil {
		return err
	}
	if err := p.reset(); err != nil {
		return err
	}
	for _, c := range p.Table().All() {
		p.note("%s", c.New)
	}
	for _, seed := range s.events {
		if err := p.event(rand.New(rand.NewPCG(seed, 3))); err != nil {
			return err
		}
	}
	return p.compare()
}

func (p *player) event(r *rand.Rand) error {
	switch n := r.IntN(400); {
	case n == 0:
		for range 1 + r.IntN(3) {
			p.note("-- %s", p.change(r, p))
		}
		if err := p.sync(); err != nil {
			return err
		}
		for _, c := range p.Table().All() {
			p.note("%s", c.New)
		}
		return nil
	case n == 1:
		silent := pick(r, []time.Duration{5 * time.Second, 20 * time.Second, 45 * time.Second, 90 * time.Second, 10 * time.Minute})
		p.note("-- silence for %v", silent)
		return p.expire(silent)
	}
	for _, f := range (traffic{r, p.mac, p.model.Flows()}).next() {
		if err := p.pass(f); err != nil {
			return err
		}
	}
	return nil
}

// pass has a frame pass program and model.
func (p *player) pass(f passing) error {
	if !isRunnable(f.frame) {
		return nil
	}
	p.packets++
	got, err := p.run(f.hook, f.frame)
	if err != nil {
		return err
	}
	err = p.model.Check(f.hook, f.frame, got)
	p.note("-- %s verdict %d\n%s", f.hook, got.Verdict, packet.Parse(f.frame))
	if err != nil {
		return disagreement{fmt.Errorf("%w\nof\n%s\n%x", err, packet.Parse(f.frame), f.frame[:min(len(f.frame), 160)])}
	}
	if have, want := p.tier.flowTable.Used(), len(p.model.Flows()); have != want {
		return disagreement{fmt.Errorf("%d flows, want %d, after\n%s", have, want, packet.Parse(f.frame))}
	}
	return nil
}

// compare compares what is left behind.
func (p *player) compare() error {
	counted, err := p.counts()
	if err != nil {
		return err
	}
	if !maps.Equal(counted, p.model.Counted) {
		return disagreement{fmt.Errorf("counted %v, want %v", counted, p.model.Counted)}
	}
	for reason, n := range counted {
		p.seen[reason] += n
	}
	if err := errors.Join(p.checkFlows(), p.checkKeys()); err != nil {
		return disagreement{err}
	}
	return nil
}

// shrink leaves out events as long as there is a disagreement.
func (p *player) shrink(s sequence) sequence {
	fails := func(events []uint64) bool { return p.play(sequence{s.cluster, events}) != nil }
	for step := len(s.events) / 2; step > 0; step /= 2 {
		for at := 0; at < len(s.events); {
			if fewer := slices.Delete(slices.Clone(s.events), at, min(at+step, len(s.events))); fails(fewer) {
				s.events = fewer
			} else {
				at += step
			}
		}
	}
	return s
}

// TestPackets compares the programs with a model of them: random clusters that
// change, and random packets, sensible and absurd ones.
func TestPackets(t *testing.T) {
	compareRandomly(t, newPath(t, Options{}), kernel.Rounds(*packetCount))
}

// TestPacketsOfPods does so with the programs of a pod's device.
func TestPacketsOfPods(t *testing.T) {
	compareRandomly(t, newPodPath(t, Options{}, false), kernel.Rounds(*packetCount/4))
	compareRandomly(t, newPodPath(t, Options{}, true), kernel.Rounds(*packetCount/10))
}

// isTame says which packets there were none of, of those that need no luck.
func (p *player) isTame(t *testing.T) {
	t.Helper()
	t.Logf("%d packets: %v", p.packets, p.seen)
	if p.packets < 25000 {
		return
	}
	for _, reason := range reasonNames {
		// What takes a full table, CPUs that race, or another proxy.
		rare := []string{"REJECT_NO_PORT", "DROP_NO_FLOW", "DROP_RACED", "DROP_REWRITE", "PASS_NETFILTER"}
		if p.seen[reason] == 0 && !slices.Contains(rare, reason) {
			t.Errorf("no packet was counted as %s: the traffic is too tame", reason)
		}
	}
}

// TestPacketsOldKernel does so with what programs have to do without on some.
func TestPacketsOldKernel(t *testing.T) {
	compareRandomly(t, newPath(t, Options{NoFIBSource: true, NoLoop: true, NoConntrack: true}), kernel.Rounds(*packetCount/10))
}

func compareRandomly(t *testing.T, on *path, packets int) {
	t.Helper()
	p := &player{path: on, seen: map[string]uint64{}}
	p.resolve(t)
	for seed := *packetSeed; p.packets < packets; seed++ {
		s := newSequence(seed)
		failed := false
		err := p.at.Do(func() error {
			err := p.play(s)
			if failed = isDisagreement(err); !failed {
				return err
			}
			s = p.shrink(s)
			p.log = &strings.Builder{}
			return p.play(s)
		})
		if failed {
			t.Fatalf("seed %d, %d events:\n%s\n%v", seed, len(s.events), p.log, err)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	p.isTame(t)
}
