// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/packet"
)

var (
	packetCount = flag.Int("packets", 250000, "random packets in TestPackets")
	packetSeed  = flag.Uint64("packets.seed", 0, "the first sequence of TestPackets")
)

// perSequence is the number of events in a sequence.
const perSequence = 800

// sequence has the seeds of a cluster and of the events that follow. Events do not depend on each
// other, so that shrink can drop those that do not contribute to a failure.
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

// disagreement is a difference between program and model. Other errors are failures of the test
// itself.
type disagreement struct{ error }

func isDisagreement(err error) bool {
	_, is := errors.AsType[disagreement](err)
	return is
}

// player plays sequences on the node and on the model.
type player struct {
	*path
	randomCluster
	packets int
	seen    map[string]uint64 // counters by reason, over all sequences
	log     *strings.Builder  // readable log of events; may be nil
}

func (p *player) note(format string, args ...any) {
	if p.log != nil {
		fmt.Fprintf(p.log, format+"\n", args...)
	}
}

// play returns the first disagreement. Call it only on a thread of the node.
func (p *player) play(s sequence) error {
	r := rand.New(rand.NewPCG(s.cluster, 2))
	p.fill(r, p)
	if p.forwarding {
		if err := p.setDirect(r); err != nil {
			return err
		}
	}
	if err := p.sync(); err != nil {
		return err
	}
	if p.forwarding {
		p.noteFrontends()
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
		if p.forwarding && r.IntN(2) == 0 {
			if err := p.setDirect(r); err != nil {
				return err
			}
		}
		if err := p.sync(); err != nil {
			return err
		}
		if p.forwarding {
			p.noteFrontends()
		}
		for _, c := range p.Table().All() {
			p.note("%s", c.New)
		}
		return nil
	case n == 1:
		silent := pick(r, []time.Duration{5 * time.Second, 20 * time.Second, 45 * time.Second, 90 * time.Second, 10 * time.Minute})
		p.note("-- silence for %v", silent)
		return p.expire(silent)
	case n < 5 && p.forwarding:
		p.note("-- a pause")
		p.pause(lbmap.OptionAfterS)
		return nil
	}
	for _, f := range (traffic{r, p.mac, p.model.Flows(), p.direct.frontends}).next() {
		if err := p.pass(f); err != nil {
			return err
		}
	}
	return nil
}

// pass runs program and model on a frame, and compares them.
func (p *player) pass(f passing) error {
	if !isRunnable(f.frame) {
		return nil
	}
	p.packets++
	got, err := p.run(f.hook, f.frame)
	if err != nil {
		return err
	}
	err = errors.Join(p.model.Check(f.hook, f.frame, got), verifyResult(f.frame, got))
	p.note("-- %s verdict %d\n%s", f.hook, got.Verdict, packet.Parse(f.frame))
	if err != nil {
		return disagreement{fmt.Errorf("%w\nof\n%s\n%x", err, packet.Parse(f.frame), f.frame[:min(len(f.frame), 160)])}
	}
	if have, want := p.tier.flowTable.Used(), len(p.model.Flows()); have != want {
		return disagreement{fmt.Errorf("%d flows, want %d, after\n%s", have, want, packet.Parse(f.frame))}
	}
	for protocol, count := range map[uint8]int{packet.ProtoTCP: lbmap.FlowKeptTCP, packet.ProtoUDP: lbmap.FlowKeptUDP} {
		if have, want := int(p.tier.flowTable.Count(count)), p.model.Kept(protocol); have != want {
			return disagreement{fmt.Errorf("%d kept flows of protocol %d, want %d, after\n%s", have, protocol, want, packet.Parse(f.frame))}
		}
	}
	return nil
}

// compare compares counters and flows after a sequence.
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

// shrink drops events while the sequence still fails.
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

// TestPackets compares the programs with a model of them, in random clusters that change, with
// random packets, both valid and malformed.
func TestPackets(t *testing.T) {
	compareRandomly(t, newPath(t, Options{}), kernel.Rounds(*packetCount))
}

// TestPacketsOfPods is TestPackets with the programs of a pod's device.
func TestPacketsOfPods(t *testing.T) {
	compareRandomly(t, newPodPath(t, Options{}, false), kernel.Rounds(*packetCount/4))
	compareRandomly(t, newPodPath(t, Options{}, true), kernel.Rounds(*packetCount/10))
}

// isTame fails the test for reasons that no packet had, except for rare ones.
func (p *player) isTame(t *testing.T) {
	t.Helper()
	t.Logf("%d packets: %v", p.packets, p.seen)
	if p.packets < 25000 {
		return
	}
	for _, reason := range reasonNames {
		// These need a full table, a race between CPUs, another proxy, a wrong route, XDP, or direct server return.
		rare := []string{"HELD_BACK", "REJECT_NO_PORT", "DROP_NO_FLOW", "DROP_RACED", "DROP_REWRITE", "PASS_NETFILTER", "PASS_NO_UPLINK", "REMAP", "ACCELERATED"}
		if !p.forwarding {
			rare = append(rare, "FORWARD_DIRECT", "UNWRAP", "DROP_NO_TARGET")
		}
		if p.seen[reason] == 0 && !slices.Contains(rare, reason) {
			t.Errorf("no packet was counted as %s: the traffic is too uniform", reason)
		}
	}
}

// TestPacketsOldKernel is TestPackets with the features turned off that older kernels lack.
func TestPacketsOldKernel(t *testing.T) {
	compareRandomly(t, newPath(t, Options{NoFIBSource: true, NoLoop: true, NoConntrack: true}), kernel.Rounds(*packetCount/10))
}

func compareRandomly(t *testing.T, on *path, packets int) {
	t.Helper()
	p := &player{path: on, seen: map[string]uint64{}}
	p.forwarding = p.direct.dispatch != nil
	if err := p.resolve(); err != nil {
		t.Fatal(err)
	}
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
			return cmp.Or(p.play(s), fmt.Errorf("once, but not again: %w", err))
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
