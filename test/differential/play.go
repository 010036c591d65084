// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/oracle"
)

// Beside are what a story is played on besides the table and the oracle. Both are optional.
type Beside struct {
	Tier     oracle.Tier
	Upstream *Node
}

// Play plays a story, and returns how many expectations it has.
func (s *Story) Play(t testing.TB, beside Beside) (count int) {
	t.Helper()
	p := &play{
		Story: s, t: t, beside: beside,
		services: map[types.NamespacedName]*v1.Service{}, slices: map[types.NamespacedName]*discoveryv1.EndpointSlice{},
	}
	p.udp = NewConntrack()
	var err error
	if p.Proxier, err = proxier.New(proxier.Options{NodeName: "node1", Facts: s.Facts, Policy: s.Policy, Tier: p}); err != nil {
		t.Fatal(err)
	}
	for i := range s.Steps {
		count += p.step(&s.Steps[i])
	}
	return count
}

// play is a story in progress. It is the proxier's tier.
type play struct {
	*Story
	*proxier.Proxier
	t        testing.TB
	beside   Beside
	services map[types.NamespacedName]*v1.Service
	slices   map[types.NamespacedName]*discoveryv1.EndpointSlice

	udp *Conntrack
}

// tier hides the methods of Proxier.
func (p *play) Sync(ctx context.Context, u proxier.Update) error {
	p.udp.Observe(&u)
	if p.beside.Tier == nil {
		return nil
	}
	return p.beside.Tier.Sync(ctx, u)
}

func (p *play) Cleanup(context.Context) error                       { return nil }
func (p *play) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

func (p *play) apply(st *Step) {
	for _, name := range st.GoneServices {
		if was := p.services[name]; was != nil {
			p.OnServiceDelete(was)
			delete(p.services, name)
		}
	}
	for _, name := range st.GoneSlices {
		if was := p.slices[name]; was != nil {
			p.OnEndpointSliceDelete(was)
			delete(p.slices, name)
		}
	}
	for _, o := range st.Services {
		name := types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
		if was := p.services[name]; was != nil {
			p.OnServiceUpdate(was, o)
		} else {
			p.OnServiceAdd(o)
		}
		p.services[name] = o
	}
	for _, o := range st.Slices {
		name := types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
		if was := p.slices[name]; was != nil {
			p.OnEndpointSliceUpdate(was, o)
		} else {
			p.OnEndpointSliceAdd(o)
		}
		p.slices[name] = o
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	if err := p.Proxier.Sync(p.t.Context()); err != nil {
		p.t.Error(err)
	}
}

func (p *play) cluster() *oracle.Cluster {
	c := &oracle.Cluster{NodeName: "node1", Facts: p.Facts, Policy: p.Policy}
	for _, name := range slices.SortedFunc(maps.Keys(p.services), byName) {
		c.Services = append(c.Services, p.services[name])
	}
	for _, name := range slices.SortedFunc(maps.Keys(p.slices), byName) {
		c.Slices = append(c.Slices, p.slices[name])
	}
	return c
}

func byName(a, b types.NamespacedName) int { return cmp.Compare(a.String(), b.String()) }

func (p *play) step(st *Step) int {
	p.t.Helper()
	p.apply(st)
	c := p.cluster()
	for i := range st.Expectations {
		p.packet(c, &st.Expectations[i])
	}
	checks := p.Table().HealthChecks()
	for _, h := range st.HealthChecks {
		got, there := checks[h.Name]
		if there == h.None || got.Ready[p.family] != h.Ready {
			p.t.Errorf("%s: has one: %t, %d endpoints", h.Text, there, got.Ready[p.family])
		}
	}
	p.flows(c, st.Conntrack)
	return len(st.Expectations) + len(st.HealthChecks) + len(st.Conntrack)
}

// outcome formats what becomes of a packet.
func outcome(o proxier.Outcome, backends []netip.Addr, hidden bool, affinity time.Duration) string {
	if o != proxier.Forward {
		return o.String()
	}
	backends = slices.Clone(backends)
	slices.SortFunc(backends, netip.Addr.Compare)
	var b strings.Builder
	for _, a := range backends {
		b.WriteString(a.String() + " ")
	}
	if hidden {
		b.WriteString("masqueraded ")
	}
	if affinity > 0 {
		fmt.Fprintf(&b, "sticky=%d", int(affinity.Seconds()))
	}
	return strings.TrimSpace(b.String())
}

// packet compares an expectation with all that are asked.
func (p *play) packet(c *oracle.Cluster, e *Expectation) {
	p.t.Helper()
	want := outcome(e.Outcome, e.Backends, e.Hidden, e.Affinity)
	differs := func(who, got string) {
		if got != want {
			p.t.Errorf("%s: %s says %q, want %q", e.Text, who, got, want)
		}
	}
	x := p.Table().Explain(e.Flow)
	if x.Decision == nil {
		differs("the table", x.Outcome.String())
	} else {
		var backends []netip.Addr
		for i := range x.Endpoints {
			if j := &x.Endpoints[i]; !j.Duplicate && x.Outcome == proxier.Forward && j.In(x.Route.Set) {
				backends = append(backends, j.Addr.Addr())
			}
		}
		differs("the table", outcome(x.Outcome, backends, x.Route.Source.HidesClient(), x.Decision.Affinity))
	}
	answer := c.Ask(e.Flow)
	var backends []netip.Addr
	for _, b := range answer.Backends {
		backends = append(backends, b.Addr())
	}
	differs("the oracle", outcome(answer.Outcome, backends, answer.Source.HidesClient(), answer.Affinity))
	if p.t.Failed() {
		return
	}
	if p.beside.Tier != nil {
		if err := p.beside.Tier.Check(c, e.Flow, &answer); err != nil {
			p.t.Errorf("%s: the rules: %v", e.Text, err)
		}
	}
	if p.beside.Upstream != nil {
		if err := p.beside.Upstream.Check(c, e.Flow, &answer); err != nil {
			p.t.Errorf("%s: upstream: %v", e.Text, err)
		}
	}
}

// flows compares which entries are deleted.
func (p *play) flows(c *oracle.Cluster, list []FlowExpectation) {
	p.t.Helper()
	var asked []udpEntry
	for _, e := range list {
		asked = append(asked, e.Flow)
	}
	ours, err := p.udp.stale(p.t.Context(), p.family, asked)
	if err != nil {
		p.t.Error(err)
	}
	theirs := ours
	if p.beside.Upstream != nil && len(list) > 0 {
		if theirs, err = p.beside.Upstream.stale(c, asked); err != nil {
			p.t.Error(err)
			return
		}
	}
	for i, e := range list {
		if ours[i] != e.Gone {
			p.t.Errorf("%s: deleted: %t", e.Text, ours[i])
		}
		if theirs[i] != ours[i] && !p.beside.Upstream.upstream.meantUDP(&udpDifference{c, e.Flow, ours[i]}) {
			p.t.Errorf("%s: deleted by Tandem: %t, by upstream: %t", e.Text, ours[i], theirs[i])
		}
	}
}
