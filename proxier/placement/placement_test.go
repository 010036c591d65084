// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/proxiertest"
)

// fake is a tier with room for so many service ports. It tells what it serves whenever
// that changes.
type fake struct {
	t        *testing.T
	room     int // none is without bounds
	refuses  func(*proxier.Decision, *proxier.Frontend) error
	has      map[uint32]*proxier.Decision
	unplaced map[uint32]error
	rules    *proxier.NodeRules
	cleaned  int
	synced   int
	fails    bool
	ahead    bool // of netfilter: it leaves alone what is left
	pending  []proxier.Update
	changed  func()
}

var errFull, errFails = errors.New("full"), errors.New("fails")

func (f *fake) Sync(_ context.Context, u proxier.Update) error {
	f.synced++
	f.pending = append(f.pending, u)
	if f.fails {
		some := slices.DeleteFunc(slices.Clone(u.Changes), func(c proxier.PortChange) bool { return c.New == nil })
		f.apply(proxier.Update{NodeRules: u.NodeRules, Changes: some[:len(some)/2]})
		return errFails
	}
	for _, u := range f.pending {
		f.apply(u)
	}
	f.pending = nil
	f.changed()
	return nil
}

func (f *fake) apply(u proxier.Update) {
	if u.NodeRules != nil {
		f.rules = u.NodeRules
	}
	if f.rules == nil && !f.fails {
		f.t.Error("a tier is not told of the node's rules")
	}
	wanted := map[uint32]bool{}
	for _, c := range u.Changes {
		wanted[c.Index()] = true
		delete(f.unplaced, c.Index())
		switch _, there := f.has[c.Index()]; {
		case c.New == nil:
			delete(f.has, c.Index())
		case f.room > 0 && !there && len(f.has) >= f.room:
			f.unplaced[c.Index()] = errFull
		default:
			f.has[c.Index()] = c.New
		}
	}
	if u.Full {
		maps.DeleteFunc(f.has, func(index uint32, _ *proxier.Decision) bool { return !wanted[index] })
		maps.DeleteFunc(f.unplaced, func(index uint32, _ error) bool { return !wanted[index] })
	}
}

// serves reports whether the tier serves a frontend that it is given.
func (f *fake) serves(fe *proxier.Frontend) bool { return !f.ahead || !fe.IsLeft() }

func (f *fake) Cleanup(context.Context) error {
	f.cleaned++
	if f.fails {
		return errFails
	}
	clear(f.has)
	f.rules = nil
	f.changed()
	return nil
}

func (f *fake) Supports(d *proxier.Decision, fe *proxier.Frontend) error {
	if f.refuses == nil {
		return nil
	}
	return f.refuses(d, fe)
}

func (f *fake) Unplaced() map[uint32]error { return f.unplaced }

// bench is both tiers, the placement, and what it was given.
type bench struct {
	t              *testing.T
	fast, fallback *fake
	tier           *Tier
	wanted         map[uint32]*proxier.Decision
	// moving says that something may be with both tiers.
	moving bool
	// kept are frontends that are there before and after what is going on.
	kept map[string]bool
}

func newBench(t *testing.T, room int) *bench {
	b := &bench{t: t, wanted: map[uint32]*proxier.Decision{}}
	newFake := func() *fake {
		return &fake{t: t, has: map[uint32]*proxier.Decision{}, unplaced: map[uint32]error{}, changed: b.check}
	}
	b.fast, b.fallback = newFake(), newFake()
	b.fast.room, b.fast.ahead = room, true
	b.fast.refuses = func(d *proxier.Decision, f *proxier.Frontend) error {
		if d.Name.Protocol == proxier.SCTP || f.Kind == proxier.ExternalIP {
			return errors.New("not here")
		}
		return nil
	}
	b.tier = New(b.fast, b.fallback, false)
	b.tier.grace = 0
	return b
}

func keyOf(d *proxier.Decision, f *proxier.Frontend) string {
	return fmt.Sprintf("%s %s %s", d.Name, d.Name.Protocol, f.Addr)
}

func served(f *fake) map[string]*proxier.Decision {
	all := map[string]*proxier.Decision{}
	for _, d := range f.has {
		for i := range d.Frontends {
			if fe := &d.Frontends[i]; f.serves(fe) {
				all[keyOf(d, fe)] = d
			}
		}
	}
	return all
}

// check is called whenever a tier changed: what stays is served at every moment.
func (b *bench) check() {
	fast, fallback := served(b.fast), served(b.fallback)
	for key := range b.kept {
		if fast[key] == nil && fallback[key] == nil {
			b.t.Errorf("no tier serves %s for a moment", key)
		}
		if fast[key] == nil && b.rejects(key, fallback[key]) {
			b.t.Errorf("the fast tier rejects %s for a moment", key)
		}
	}
}

// rejects reports whether the fast tier rejects connections to a frontend that the fallback
// has, as it does not know of it.
func (b *bench) rejects(key string, d *proxier.Decision) bool {
	return d != nil && b.fast.rules != nil && len(b.fast.rules.Unserved) > 0 &&
		slices.ContainsFunc(d.Frontends, func(f proxier.Frontend) bool { return f.Kind == proxier.ClusterIP && keyOf(d, &f) == key })
}

func (b *bench) frontends() map[string]bool {
	all := map[string]bool{}
	for _, d := range b.wanted {
		for i := range d.Frontends {
			all[keyOf(d, &d.Frontends[i])] = true
		}
	}
	return all
}

// sync gives the placement some changes, and compares what is served afterwards.
func (b *bench) sync(full bool, changes ...proxier.PortChange) {
	b.t.Helper()
	before, fast, fallback := b.frontends(), served(b.fast), served(b.fallback)
	// One that is new, and that a fallback that failed got nevertheless, is not served yet.
	maps.DeleteFunc(before, func(key string, _ bool) bool {
		return fast[key] == nil && (fallback[key] == nil || b.rejects(key, fallback[key]))
	})
	for _, c := range changes {
		if c.New == nil {
			delete(b.wanted, c.Index())
		} else {
			b.wanted[c.Index()] = c.New
		}
	}
	if full {
		changes = nil
		for _, index := range slices.Sorted(maps.Keys(b.wanted)) {
			changes = append(changes, proxier.PortChange{New: b.wanted[index]})
		}
	}
	b.kept = b.frontends()
	maps.DeleteFunc(b.kept, func(key string, _ bool) bool { return !before[key] })
	u := proxier.Update{Full: full, Changes: changes}
	if full {
		u.NodeRules = &proxier.NodeRules{Unserved: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}
	}
	err := b.tier.Sync(b.t.Context(), u)
	b.tier.Wait()
	switch fails := b.fast.fails || b.fallback.fails; {
	case err == nil:
		b.kept = nil
		if !b.moving {
			b.compare()
		}
	case !fails:
		b.t.Fatal(err)
	}
}

// compare reports whether each frontend is served by one tier, as of now, and by the fast
// one if it can.
func (b *bench) compare() {
	b.t.Helper()
	fast, fallback := served(b.fast), served(b.fallback)
	clusterIPs := false
	for _, d := range b.wanted {
		overflow := b.tier.overflow[d.Index()] != nil
		for i := range d.Frontends {
			f := &d.Frontends[i]
			key := keyOf(d, f)
			inFast := b.fast.Supports(d, f) == nil && !overflow && !d.OptedOut
			slow := !inFast || b.tier.both
			if (fast[key] != nil) != inFast || (fallback[key] != nil) != slow {
				b.t.Errorf("%s: in the fast tier %v, in the fallback %v, want %v and %v", key, fast[key] != nil, fallback[key] != nil, inFast, slow)
			}
			if says := b.tier.FallbackHas(d.Name.Protocol)(f.Addr); says != slow {
				b.t.Errorf("%s: the fallback is said to have it: %v", key, says)
			}
			for _, got := range []*proxier.Decision{fast[key], fallback[key]} {
				if got != nil && !slices.Equal(got.Backends, d.Backends) {
					b.t.Errorf("%s has the backends of another time", key)
				}
			}
			clusterIPs = clusterIPs || slow && f.Kind == proxier.ClusterIP
			delete(fast, key)
			delete(fallback, key)
		}
	}
	if len(fast)+len(fallback) > 0 {
		b.t.Errorf("served, and not desired: %v %v", slices.Collect(maps.Keys(fast)), slices.Collect(maps.Keys(fallback)))
	}
	if rules := b.fast.rules; rules != nil && (len(rules.Unserved) == 0) != clusterIPs {
		b.t.Errorf("the fast tier rejects unallocated ClusterIPs: %v, while the fallback serves ClusterIPs: %v", len(rules.Unserved) > 0, clusterIPs)
	}
}

// TestLeft: of a UDP service port that opts out, the fast tier keeps the backends, and knows the frontends that
// another tier serves.
func TestLeft(t *testing.T) {
	b := newBench(t, 0)
	c := b.decide(rand.New(rand.NewPCG(1, 1)), 7)
	b.sync(true, c)
	out := *c.New
	out.OptedOut = true
	b.sync(false, proxier.PortChange{Old: c.New, New: &out})
	has := b.fast.has[c.Index()]
	if has == nil || !slices.Equal(has.Backends, out.Backends) || len(has.Frontends) != len(out.Frontends) {
		t.Fatalf("the fast tier has %v of %v", has, &out)
	}
	for i := range has.Frontends {
		if f := &has.Frontends[i]; !f.IsLeft() || out.Frontends[i].IsLeft() {
			t.Errorf("frontend %s: left %v; left by the decision %v", f.Addr, f.IsLeft(), out.Frontends[i].IsLeft())
		}
	}
}

// TestForeignTakesNoRoom: the fast tier gets nothing of a UDP service port that another proxy serves.
func TestForeignTakesNoRoom(t *testing.T) {
	b := newBench(t, 0)
	b.tier.share = &proxier.Share{}
	c := b.decide(rand.New(rand.NewPCG(1, 1)), 7)
	rules := proxier.NodeRules{}
	// Nor what is left to a cache on the node besides.
	for _, left := range []*proxier.Left{nil, {Sockets: true, Why: "a cache"}} {
		d := *c.New
		d.OptedOut = false
		d.Frontends = slices.Clone(d.Frontends)
		for i := range d.Frontends {
			d.Frontends[i].Left = left
		}
		if err := b.tier.Sync(t.Context(), proxier.Update{Full: true, NodeRules: &rules, Changes: []proxier.PortChange{{New: &d}}}); err != nil {
			t.Fatal(err)
		}
		if has := b.fast.has[c.Index()]; has != nil {
			t.Errorf("left %v: the fast tier has %v", left, has)
		}
	}
}

// decide makes a decision with these frontends. The table gives indexes, so decisions
// come from one.
func (b *bench) decide(random *rand.Rand, i int) proxier.PortChange {
	protocol := proxier.TCP
	if i%5 == 0 {
		protocol = proxier.SCTP
	}
	if i == 7 {
		protocol = proxier.UDP
	}
	d := proxiertest.Decision(proxier.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: fmt.Sprint("s", i)}, Protocol: protocol}, uint32(i))
	d.Frontends = []proxier.Frontend{{Kind: proxier.ClusterIP, Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(i)}), 80)}}
	if i%3 == 0 {
		d.Frontends = append(d.Frontends, proxier.Frontend{Kind: proxier.ExternalIP, Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), 80)})
	}
	d.OptedOut = i%7 == 0 && random.IntN(2) == 0
	d.Backends = []proxier.Backend{{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(random.IntN(250)), 1}), 8080)}}
	return proxier.PortChange{Old: b.wanted[uint32(i)], New: d}
}

// Random histories: each frontend is served by exactly one tier, or also by the fallback
// if that is to have everything, and at every moment.
func TestPlacement(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		b := newBench(t, 1+random.IntN(12))
		b.tier.both = seed%4 == 0
		step := 1
		if seed%3 == 0 {
			step = 7 // those alone that may opt out
		}
		b.sync(true)
		for range 40 {
			var changes []proxier.PortChange
			for range random.IntN(4) {
				i := step * (1 + random.IntN(20/step))
				if slices.ContainsFunc(changes, func(c proxier.PortChange) bool { return c.Index() == uint32(i) }) {
					continue
				}
				c := b.decide(random, i)
				if random.IntN(3) == 0 {
					if c.Old == nil {
						continue
					}
					c.New = nil
				}
				changes = append(changes, c)
			}
			b.sync(random.IntN(5) == 0, changes...)
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// Tiers that fail at random: what was served still is, by one of them.
func TestFailures(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 2))
		b := newBench(t, 1+random.IntN(12))
		b.moving = true
		// Others served everything before.
		var all []proxier.PortChange
		for _, i := range []int{1, 2, 3, 4, 7, 14} {
			c := b.decide(random, i)
			all = append(all, c)
			b.wanted[uint32(i)], b.fallback.has[uint32(i)] = c.New, c.New
		}
		b.fast.fails, b.fallback.fails = random.IntN(2) == 0, random.IntN(4) == 0
		b.sync(true, all...)
		for range 30 {
			b.fast.fails, b.fallback.fails = random.IntN(4) == 0, random.IntN(4) == 0
			var changes []proxier.PortChange
			if i := 1 + random.IntN(20); random.IntN(2) == 0 {
				changes = append(changes, b.decide(random, i))
			}
			b.sync(random.IntN(3) == 0, changes...)
		}
		b.fast.fails = false
		if seed%2 == 0 {
			for _, i := range slices.Sorted(maps.Keys(b.wanted)) {
				b.fallback.fails = random.IntN(2) == 0
				b.sync(false, proxier.PortChange{Old: b.wanted[i]})
			}
			// One that comes and goes while the fallback fails.
			b.fallback.fails = false
			b.sync(true)
			b.fallback.fails = true
			b.sync(false, b.decide(random, 5), b.decide(random, 15))
			b.sync(false, proxier.PortChange{Old: b.wanted[5]}, proxier.PortChange{Old: b.wanted[15]})
		}
		b.fallback.fails = false
		for range 3 { // what moves takes one, and what has moved another
			b.sync(true)
		}
		b.compare()
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// A fallback that serves nothing is not there, and costs nothing; it is cleaned up once
// the fast tier has everything, since others may have left rules of its kind.
func TestIdleFallback(t *testing.T) {
	b := newBench(t, 0)
	random := rand.New(rand.NewPCG(1, 1))
	plain, sctp := b.decide(random, 1), b.decide(random, 5)
	b.sync(true, plain)
	if b.fallback.synced != 0 || b.fallback.cleaned != 1 {
		t.Errorf("the fallback was synced %d times and cleaned up %d times", b.fallback.synced, b.fallback.cleaned)
	}
	b.sync(false, b.decide(random, 1))
	b.sync(true)
	if b.fallback.synced != 0 || b.fallback.cleaned != 1 {
		t.Errorf("later the fallback was synced %d times and cleaned up %d times", b.fallback.synced, b.fallback.cleaned)
	}
	b.tier.OtherEnded()
	b.sync(false, b.decide(random, 1))
	b.sync(true)
	b.sync(true)
	if b.fallback.synced != 0 || b.fallback.cleaned != 2 {
		t.Errorf("after the end of another proxy the fallback was synced %d times and cleaned up %d times", b.fallback.synced, b.fallback.cleaned-1)
	}
	b.sync(false, sctp)
	if b.fallback.synced == 0 {
		t.Error("the fallback does not serve what the fast tier cannot")
	}
	b.sync(false, proxier.PortChange{Old: sctp.New})
	if b.fallback.cleaned != 3 {
		t.Error("the fallback serves nothing and is still there")
	}
	if err := b.tier.Supports(sctp.New, &sctp.New.Frontends[0]); err != nil {
		t.Error(err)
	}
	if b.tier.Why(sctp.New, &sctp.New.Frontends[0]) == nil {
		t.Error("no reason why the fallback serves it")
	}
}

// A NodePort has the addresses of its family, and a frontend those of its protocol.
func TestFallbackHas(t *testing.T) {
	b := newBench(t, 0)
	c := b.decide(rand.New(rand.NewPCG(1, 1)), 7)
	c.New.OptedOut = true
	c.New.Frontends = append(c.New.Frontends, proxier.Frontend{Kind: proxier.NodePort, Addr: netip.MustParseAddrPort("0.0.0.0:30007")})
	b.sync(true, c)
	for to, want := range map[string]bool{
		"10.96.0.7:80": true, "10.96.0.7:81": false, "10.96.0.8:80": false,
		"172.18.0.1:30007": true, "[fd00:18::1]:30007": false, "172.18.0.1:80": false,
	} {
		if got := b.tier.FallbackHas(proxier.UDP)(netip.MustParseAddrPort(to)); got != want {
			t.Errorf("%s: %v", to, got)
		}
		if b.tier.FallbackHas(proxier.TCP)(netip.MustParseAddrPort(to)) {
			t.Errorf("%s is one of TCP", to)
		}
	}
}

// What the fast tier has got stays in the fallback for a while.
func TestGrace(t *testing.T) {
	b := newBench(t, 1)
	random := rand.New(rand.NewPCG(1, 1))
	first, second := b.decide(random, 1), b.decide(random, 2)
	b.sync(true, first, second)
	if len(b.fallback.has) != 1 {
		t.Fatal("nothing overflows")
	}
	b.tier.grace = time.Hour
	u := proxier.Update{Changes: []proxier.PortChange{{Old: first.New}}}
	for range 2 { // the first makes room, the second finds it
		if err := b.tier.Sync(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		u = proxier.Update{Full: true, NodeRules: &proxier.NodeRules{}, Changes: []proxier.PortChange{{New: second.New}}}
	}
	if len(b.fast.has) != 1 || len(b.fallback.has) != 1 {
		t.Errorf("the fast tier has %d and the fallback %d", len(b.fast.has), len(b.fallback.has))
	}
	b.tier.grace = 0
	if err := b.tier.Sync(t.Context(), proxier.Update{}); err != nil {
		t.Fatal(err)
	}
	b.tier.Wait()
	if len(b.fast.has) != 1 || len(b.fallback.has) != 0 {
		t.Errorf("later the fast tier has %d and the fallback %d", len(b.fast.has), len(b.fallback.has))
	}
}

// A fallback that fails holds up nothing that the fast tier serves.
func TestFailingFallback(t *testing.T) {
	b := newBench(t, 0)
	random := rand.New(rand.NewPCG(1, 1))
	b.fallback.fails = true
	u := proxier.Update{Full: true, NodeRules: &proxier.NodeRules{}, Changes: []proxier.PortChange{b.decide(random, 1), b.decide(random, 5)}}
	if err := b.tier.Sync(t.Context(), u); !errors.Is(err, errFails) {
		t.Errorf("error %v", err)
	}
	if len(b.fast.has) != 1 {
		t.Error("the fast tier does not serve its own")
	}
	b.fallback.fails = false
	if err := b.tier.Sync(t.Context(), proxier.Update{}); err != nil {
		t.Fatal(err)
	}
	if len(b.fallback.has) != 1 {
		t.Error("the fallback was not given what is pending")
	}
	for _, tier := range []*fake{b.fast, b.fallback} {
		tier.fails = true
		for _, i := range []int{2, 10} {
			if err := b.tier.Sync(t.Context(), proxier.Update{Changes: []proxier.PortChange{b.decide(random, i)}}); i == 10 && !errors.Is(err, errFails) {
				t.Errorf("error %v", err)
			}
		}
		tier.fails = false
		before := tier.synced
		if err := b.tier.Sync(t.Context(), proxier.Update{}); err != nil || tier.synced == before {
			t.Errorf("a tier that failed is not synced again: %v", err)
		}
	}
}
