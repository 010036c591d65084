// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/oracle"
)

// tested is a tier on a kernel that fails now and then, and with processes that die.
type tested struct {
	*Tier
	rng    *rand.Rand
	kernel *fakeKernel
	ruled  *fakeRules
	clock  *testingclock.FakeClock
	opts   Options
	there  map[uint32]*proxier.Decision
	node   *proxier.NodeRules
	// drains are destinations without a weight, and since when.
	drains     map[drain]time.Time
	unfinished bool  // the last sync failed
	err        error // what was wrong meanwhile
}

type drain struct {
	server serverKey
	to     netip.AddrPort
}

var errLost = errors.New("a message was lost")

func newTested(seed uint64) *tested {
	t := &tested{
		rng: rand.New(rand.NewPCG(seed, 1)), kernel: newFakeKernel(), clock: testingclock.NewFakeClock(time.Unix(1e9, 0)),
		there: map[uint32]*proxier.Decision{}, drains: map[drain]time.Time{},
	}
	t.ruled = newFakeRules(t.kernel)
	t.opts = Options{Clock: t.clock}
	t.Tier = process(t.kernel, t.opts, t.ruled)
	t.kernel.Weighed = func(k serverKey, to netip.AddrPort, weight int) {
		_, drains := t.drains[drain{k, to}]
		switch {
		case weight > 0:
			delete(t.drains, drain{k, to})
		case !drains:
			t.drains[drain{k, to}] = t.clock.Now()
		}
	}
	failing, times := t.chance(0.5), map[string]uint64{}
	t.kernel.Fails = func(what string) (before, after error) {
		times[what]++
		hash := fnv.New64a()
		_, _ = hash.Write([]byte(what))
		rng := rand.New(rand.NewPCG(seed+times[what], hash.Sum64()))
		if !failing || rng.Float64() > 0.03 {
			return nil, nil
		}
		err := []error{errLost, unix.ENOBUFS, unix.ENOSPC}[rng.IntN(3)]
		if rng.IntN(2) == 0 {
			return err, nil
		}
		return nil, err
	}
	return t
}

func (t *tested) chance(p float64) bool { return t.rng.Float64() < p }

// Sync implements proxier.Tier: what it is told, full syncs at any time, and other
// processes.
func (t *tested) Sync(ctx context.Context, u proxier.Update) error {
	before := maps.Clone(t.there)
	if t.unfinished {
		clear(before) // that may not have been served
	}
	if u.NodeRules != nil {
		t.node = u.NodeRules
	}
	for _, c := range u.Changes {
		if c.New != nil {
			t.there[c.Index()] = c.New
			continue
		}
		delete(t.there, c.Index())
	}
	all := proxier.Update{Full: true, NodeRules: t.node}
	for _, index := range slices.Sorted(maps.Keys(t.there)) {
		all.Changes = append(all.Changes, proxier.PortChange{New: t.there[index]})
	}
	if t.chance(0.05) {
		t.Tier = process(t.kernel, t.opts, t.ruled)
		u = all
	}
	t.connect()
	t.kernel.Gone = func() {
		if t.err == nil && u.NodeRules == nil {
			t.err = t.missing(before)
		}
	}
	t.kernel.Cut = func(k serverKey, to netip.AddrPort, d *destination) {
		since, drains := t.drains[drain{k, to}]
		if t.err == nil && (!drains || t.clock.Now().Sub(since) < t.opts.drain()) {
			t.err = fmt.Errorf("connections of %s to %s are cut off, %+v", k, to, *d)
		}
	}
	err := t.Tier.Sync(ctx, u)
	if err == nil && t.chance(0.2) {
		err = t.Tier.Sync(ctx, all)
	}
	for tries := 0; err != nil && tries < 100; tries++ {
		if t.unfinished = t.chance(0.2); t.unfinished {
			return t.err // something else happens meanwhile
		}
		err = t.Tier.Sync(ctx, proxier.Update{})
	}
	t.kernel.Gone, t.unfinished = nil, false
	t.clock.Step([]time.Duration{0, time.Second, time.Minute, time.Hour}[t.rng.IntN(4)])
	if err == nil && t.err == nil {
		t.err = t.compare(all)
	}
	return errors.Join(err, t.err)
}

// connect has clients come and go.
func (t *tested) connect() {
	for _, k := range slices.SortedFunc(maps.Keys(t.kernel.Servers), func(a, b serverKey) int { return strings.Compare(a.String(), b.String()) }) {
		to := t.kernel.Servers[k].To
		for _, a := range slices.SortedFunc(maps.Keys(to), netip.AddrPort.Compare) {
			if to[a].Weight == 0 {
				if t.chance(0.2) {
					to[a].Active = 0
				}
				continue
			}
			if to[a].Active = 0; t.chance(0.3) {
				to[a].Active = 1
			}
		}
	}
}

// missing finds a frontend that was served before, that still has to be, and is not.
func (t *tested) missing(before map[uint32]*proxier.Decision) error {
	for index, d := range t.there {
		old := before[index]
		if old == nil {
			continue
		}
		for i := range d.Frontends {
			f := &d.Frontends[i]
			same := func(o proxier.Frontend) bool { return o.Addr == f.Addr && o.Conflict == nil }
			set := f.Routes[proxier.FromOutside].Set
			if f.Conflict != nil || f.Kind == proxier.NodePort || !slices.ContainsFunc(old.Frontends, same) || d.Size(set) == 0 || old.Size(set) == 0 {
				continue
			}
			if r := t.ruled.There[index]; r != nil && slices.ContainsFunc(r.Frontends, same) {
				continue
			}
			s := t.kernel.Servers[keyOf(f.Addr, d.Name.Protocol)]
			if s == nil || !has(t.kernel.Addrs, f.Addr.Addr()) && !slices.Contains(t.node.LocalAddrs, f.Addr.Addr()) {
				return fmt.Errorf("nothing serves %s of %s for a moment", f, d.Name)
			}
			if !slices.ContainsFunc(slices.Collect(maps.Values(s.To)), func(d *destination) bool { return d.Weight > 0 }) {
				return fmt.Errorf("%s of %s has no destination for a moment", f, d.Name)
			}
		}
	}
	return nil
}

// state is what there is to see of a kernel, but for what is draining.
func state(k *fakeKernel, t *Tier) (list []string) {
	for key, s := range k.Servers {
		if has(t.servers.going, key) {
			continue
		}
		var to []string
		for a, d := range s.To {
			if d.Weight > 0 {
				to = append(to, fmt.Sprintf("%s weight %d", a, d.Weight))
			}
		}
		slices.Sort(to)
		list = append(list, fmt.Sprintf("server %s %+v %s", key, s.Server, to))
	}
	for a := range k.Addrs {
		if !t.addrs.isUnused(a) {
			list = append(list, "address "+a.String())
		}
	}
	for m := range k.Members {
		if !t.members.isUnused(m) {
			list = append(list, "member "+m.String())
		}
	}
	slices.Sort(list)
	return list
}

// isUnused reports whether an object is there that is not wanted.
func (c *counted[K]) isUnused(k K) bool {
	item := c.Get(k)
	return item != nil && !item.Wanted()
}

// refusesAny reports whether the kernel has just not taken a service port.
func (t *tested) refusesAny() bool {
	for index := range t.ports.All() {
		if t.ports.Err(index) != nil {
			return true
		}
	}
	return false
}

// calm has all clients go. Then nothing is left to drain.
func (t *tested) calm(all proxier.Update) error {
	fails := t.kernel.Fails
	t.kernel.Fails, t.kernel.Cut = nil, nil
	defer func() { t.kernel.Fails = fails }()
	for range 2 {
		for _, s := range t.kernel.Servers {
			for _, d := range s.To {
				d.Active = 0
			}
		}
		if err := t.Tier.Sync(context.Background(), all); err != nil {
			return err
		}
	}
	n := len(t.Tier.servers.going)
	for _, item := range t.addrs.All() {
		if !item.Wanted() {
			n++
		}
	}
	for _, item := range t.members.All() {
		if !item.Wanted() {
			n++
		}
	}
	if n > 0 {
		return fmt.Errorf("%d objects drain without clients", n)
	}
	for k, s := range t.kernel.Servers {
		for a, d := range s.To {
			if k.Protocol != proxier.UDP && d.Weight == 0 {
				return fmt.Errorf("%s of %s drains without clients", a, k)
			}
		}
	}
	return nil
}

// compare compares with a kernel that was never anything else.
func (t *tested) compare(all proxier.Update) error {
	if t.refusesAny() {
		return nil // rules serve it until the next full sync
	}
	other := newFakeKernel()
	rules := newFakeRules(other)
	fresh := process(other, t.opts, rules)
	if err := fresh.Sync(context.Background(), all); err != nil {
		return err
	}
	if t.chance(0.2) {
		if err := t.calm(all); err != nil {
			return err
		}
	}
	if diff := cmp.Diff(state(other, fresh), state(t.kernel, t.Tier)); diff != "" {
		return fmt.Errorf("the kernel is not as it should be:\n%s", diff)
	}
	for k, s := range t.kernel.Servers {
		want := t.Tier.servers.wanted(k)
		for a := range s.To {
			if k.Protocol != proxier.TCP && want != nil && !slices.ContainsFunc(want.to, func(t target) bool { return t.addr == a }) {
				return fmt.Errorf("%s of %s is gone, and still there", a, k)
			}
		}
	}
	if diff := cmp.Diff(texts(rules.There), texts(t.ruled.There)); diff != "" {
		return fmt.Errorf("rules are not as they should be:\n%s", diff)
	}
	return nil
}

func texts(list map[uint32]*proxier.Decision) map[uint32]string {
	out := map[uint32]string{}
	for index, d := range list {
		out[index] = d.String()
	}
	return out
}

// Check implements oracle.Tier: what virtual servers and sets make of a packet is what
// was decided. What rules have is theirs.
func (t *tested) Check(c *oracle.Cluster, flow proxier.Flow, want *oracle.Answer) error {
	to := flow.Destination
	local := func(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(c.Facts.LocalAddrs, a) }
	if to.Addr().IsUnspecified() || to.Addr().IsLoopback() || t.ruledBy(to, flow.Protocol) {
		return nil
	}
	if local(flow.Source.Addr()) && want.Origin != proxier.FromHost {
		return nil // no packet of this host comes in by a device of pods
	}
	if t.unfinished {
		return nil // it is to be tried again
	}
	if t.refusesAny() {
		return nil
	}
	got := t.trace(flow, want.Origin, local)
	outcome := want.Outcome
	bound := has(t.kernel.Addrs, to.Addr())
	drains := has(t.Tier.servers.going, keyOf(to, flow.Protocol))
	if (bound || drains) && outcome == proxier.Pass {
		outcome = proxier.Rejected // it is this node's
	}
	if !bound && outcome == proxier.Rejected && got.outcome == proxier.Pass {
		return nil // that is up to the rules
	}
	switch {
	case got.outcome != outcome:
		return fmt.Errorf("it is %s, want %s", got.outcome, outcome)
	case outcome != proxier.Forward:
		return nil
	case !slices.Equal(got.to, want.Backends):
		return fmt.Errorf("it is led to %s, want %s", got.to, want.Backends)
	case want.Origin != proxier.FromHost && got.hidden != (want.Source != proxier.KeepSource):
		return fmt.Errorf("masqueraded: %t, want %s", got.hidden, want.Source)
	}
	return nil
}

func (t *tested) ruledBy(to netip.AddrPort, p proxier.Protocol) bool {
	for _, d := range t.ruled.There {
		for i := range d.Frontends {
			f := &d.Frontends[i]
			if d.Name.Protocol != p || f.Conflict != nil {
				continue
			}
			// NodePorts that virtual servers have as well are for loopback addresses.
			if f.Addr == to || f.Kind == proxier.NodePort && f.Addr.Port() == to.Port() && t.refuses(d, f) != nil {
				return true
			}
		}
	}
	return false
}

type traced struct {
	outcome proxier.Outcome
	to      []netip.AddrPort
	hidden  bool
}

// trace does what the constant rules and the kernel do, by sets.
func (t *tested) trace(flow proxier.Flow, origin proxier.Origin, local func(netip.Addr) bool) (out traced) {
	to, source := flow.Destination, flow.Source.Addr()
	family := proxier.FamilyOf(to.Addr())
	in := func(name setName) bool { return has(t.kernel.Members, memberOf(name, to, flow.Protocol)) }
	switch {
	case in(loadBalancer) && !in(loadBalancerLocal), in(externalIP):
		out.hidden = true
	case in(clusterIP):
		out.hidden = t.opts.MasqueradeAll || t.nodeRules.Pods.Knows(family) && origin != proxier.FromPod
	case local(to.Addr()):
		sets := nodePortSets[flow.Protocol]
		out.hidden = in(sets[0]) && !in(sets[1])
	}
	if in(loadBalancerFW) && !slices.ContainsFunc(slices.Collect(maps.Keys(t.kernel.Members)), func(m member) bool {
		m2 := memberOf(m.name, to, flow.Protocol)
		return (m.name == loadBalancerSourceCIDR || m.name == loadBalancerSourceIP) && m.addr == m2.addr && m.port == m2.port && m.protocol == m2.protocol && m.from.Contains(source)
	}) {
		return traced{outcome: proxier.Dropped}
	}
	bound := has(t.kernel.Addrs, to.Addr())
	if bound && !in(loadBalancer) && !in(clusterIP) && !in(externalIP) && !in(externalIPLocal) && has(t.kernel.Members, member{set: set{boundIPs, family}, addr: to.Addr()}) {
		return traced{outcome: proxier.Rejected}
	}
	s := t.kernel.Servers[keyOf(to, flow.Protocol)]
	if s == nil || !bound && !local(to.Addr()) {
		return traced{outcome: proxier.Pass}
	}
	for a, d := range s.To {
		if d.Weight > 0 {
			out.to = append(out.to, a)
		}
	}
	slices.SortFunc(out.to, netip.AddrPort.Compare)
	if out.outcome = proxier.Forward; len(out.to) == 0 {
		out.outcome = proxier.Rejected
	}
	return out
}

// TestOracle: after any history, with messages that are lost, refusals, and processes that
// die, virtual servers and sets do with packets what the oracle says, and nothing is
// missing meanwhile. For a night of it:
//
//	go test ./proxier/ipvs -run=TestOracle$ -timeout=0 -oracle.flows=1000000000
func TestOracle(t *testing.T) {
	worlds := oracle.Worlds{
		Share: 2, Steps: 15, Flows: 60, Events: oracle.Small,
		Tier: func(seed uint64) oracle.Tier { return newTested(seed) },
	}
	worlds.Run(t)
}
