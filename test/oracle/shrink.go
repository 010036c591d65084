// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"net/netip"
	"reflect"
	"runtime/debug"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/scenarios"
)

// defect is a history that leads to a disagreement.
type defect struct {
	h       history
	proxied bool
	seed    uint64 // for checkDump and the tier
	spoil   wrongAnswer
	tier    func(seed uint64) Tier
	what    string
	flow    proxier.Flow
}

// player returns a player for the subject of the defect; the table alone needs no proxier.
func (d *defect) player() *player {
	var t Tier
	if d.tier != nil {
		t = d.tier(d.seed)
	}
	return newPlayer(d.h, d.proxied, t)
}

// reproduce plays the history and returns the disagreement, if it is of the same kind.
func (d *defect) reproduce() (found *failure) {
	defer func() {
		if r := recover(); r != nil {
			found = &failure{what: "panic", flow: d.flow, text: fmt.Sprintf("panic: %v\n%s", r, debug.Stack())}
		}
		if found != nil && found.what != d.what {
			found = nil
		}
	}()
	p := d.player()
	if len(d.h.steps) == 0 {
		return nil // the history is empty
	}
	for _, st := range d.h.steps {
		p.play(st)
	}
	c := p.cluster()
	switch d.what {
	case "changes", "frontends", "health":
		return checkState(p.s, c)
	case "dump":
		return checkDump(p.s, c, d.seed)
	case "panic":
		if !d.flow.Destination.IsValid() {
			checkState(p.s, c)
			checkDump(p.s, c, d.seed)
			return nil
		}
	}
	return checkFlow(p.s, c, d.flow, d.spoil)
}

// quietly recovers from a panic, which may be the defect.
func quietly(f func()) {
	defer func() { _ = recover() }()
	f()
}

// shrink greedily removes what is not needed to reproduce the defect, until nothing more
// can be removed.
func (d *defect) shrink(deadline time.Time) {
	// Best is only the final state, in one step, and directly on the table.
	p := newPlayer(d.h, false, nil)
	for _, st := range d.h.steps {
		quietly(func() { p.play(st) })
	}
	last := step{}
	c := p.cluster()
	for _, s := range c.Services {
		last.events = append(last.events, event{service: s})
	}
	for _, s := range c.Slices {
		last.events = append(last.events, event{slice: s})
	}
	d.try(func(h *history) { h.facts, h.steps = p.facts, []step{last} })
	if d.proxied && d.tier == nil {
		d.proxied = false
		if d.reproduce() == nil {
			d.proxied = true
		}
	}
	for again := true; again && time.Now().Before(deadline); {
		again = d.round(deadline)
	}
}

// round tries all simplifications once and reports whether any succeeded.
func (d *defect) round(deadline time.Time) (smaller bool) {
	try := func(change func(*history)) bool {
		if d.try(change) {
			smaller = true
			return true
		}
		return false
	}
	// Steps, then events, in decreasing pieces.
	for n := len(d.h.steps); n > 0; n /= 2 {
		for i := len(d.h.steps) - n; i >= 0; i -= n {
			try(func(h *history) { h.steps = slices.Delete(h.steps, i, i+n) })
		}
	}
	for s := range d.h.steps {
		for n := len(d.h.steps[s].events); n > 0; n /= 2 {
			for i := len(d.h.steps[s].events) - n; i >= 0; i -= n {
				try(func(h *history) { h.steps[s].events = slices.Delete(h.steps[s].events, i, i+n) })
			}
		}
		if d.h.steps[s].facts != nil {
			try(func(h *history) { h.steps[s].facts = nil })
		}
	}
	// Simplify the remaining objects.
	for s := range d.h.steps {
		for e := range d.h.steps[s].events {
			for i := 0; time.Now().Before(deadline); {
				simpler, ok := simplify(d.h.steps[s].events[e], i)
				if !ok {
					break
				}
				if simpler == nil || !try(func(h *history) { h.steps[s].events[e] = *simpler }) {
					i++
				}
			}
		}
	}
	// The node: as in a scenario without commands about it.
	for s := -1; s < len(d.h.steps); s++ {
		if s >= 0 && d.h.steps[s].facts == nil {
			continue
		}
		for i := range simplerFacts {
			d.tryIf(func(h *history) bool {
				f := &h.facts
				if s >= 0 {
					copied := *h.steps[s].facts
					h.steps[s].facts, f = &copied, &copied
				}
				return simplerFacts[i](f)
			}, &smaller)
		}
	}
	for i := range simplerPolicy {
		d.tryIf(func(h *history) bool { return simplerPolicy[i](&h.policy, &h.settings) }, &smaller)
	}
	// A flow that a scenario can express.
	for _, f := range simplerFlows(d.flow, d.h.now().LocalAddrs) {
		was := d.flow
		if f == was {
			break // the first one that works is the best
		}
		d.flow = f
		if d.reproduce() != nil {
			smaller = true
			break
		}
		d.flow = was
	}
	return smaller
}

// try keeps a change if the defect can still be reproduced.
func (d *defect) try(change func(*history)) bool {
	was := d.h
	d.h.steps = slices.Clone(was.steps)
	for i := range d.h.steps {
		d.h.steps[i].events = slices.Clone(d.h.steps[i].events)
	}
	change(&d.h)
	if d.reproduce() != nil {
		return true
	}
	d.h = was
	return false
}

// tryIf is try for a change that may have no effect.
func (d *defect) tryIf(change func(*history) bool, smaller *bool) {
	did := false
	if d.try(func(h *history) { did = change(h) }) && did {
		*smaller = true
	}
}

// simplify returns an event whose object has the i-th of its simplifications;
// nil if that is the same object, and false if there are no more.
func simplify(e event, i int) (*event, bool) {
	if e.gone {
		return nil, false
	}
	if e.service != nil {
		s, ok := changed(e.service, e.service.DeepCopy(), serviceChanges(e.service), i)
		if s == nil {
			return nil, ok
		}
		return &event{service: s}, true
	}
	s, ok := changed(e.slice, e.slice.DeepCopy(), sliceChanges(e.slice), i)
	if s == nil {
		return nil, ok
	}
	return &event{slice: s}, true
}

func changed[O any](was, is *O, changes []func(*O), i int) (*O, bool) {
	if i >= len(changes) {
		return nil, false
	}
	changes[i](is)
	if reflect.DeepEqual(was, is) {
		return nil, true
	}
	return is, true
}

// without returns changes that remove parts of a list: halves first.
func without[O, E any](n int, list func(*O) *[]E) (changes []func(*O)) {
	for size := (n + 1) / 2; size > 0; size /= 2 {
		for i := 0; i < n; i += size {
			changes = append(changes, func(o *O) {
				l := list(o)
				*l = slices.Delete(*l, i, min(i+size, len(*l)))
			})
		}
	}
	return changes
}

func serviceChanges(s *v1.Service) (changes []func(*v1.Service)) {
	add := func(list ...func(*v1.Service)) { changes = append(changes, list...) }
	add(without(len(s.Spec.Ports), func(s *v1.Service) *[]v1.ServicePort { return &s.Spec.Ports })...)
	add(without(len(s.Spec.ExternalIPs), func(s *v1.Service) *[]string { return &s.Spec.ExternalIPs })...)
	add(without(len(s.Status.LoadBalancer.Ingress), func(s *v1.Service) *[]v1.LoadBalancerIngress { return &s.Status.LoadBalancer.Ingress })...)
	add(without(len(s.Spec.LoadBalancerSourceRanges), func(s *v1.Service) *[]string { return &s.Spec.LoadBalancerSourceRanges })...)
	if len(s.Spec.ClusterIPs) > 1 {
		add(without(len(s.Spec.ClusterIPs), func(s *v1.Service) *[]string { return &s.Spec.ClusterIPs })...)
	}
	add(
		func(s *v1.Service) { s.UID = "" },
		func(s *v1.Service) { s.Labels = nil },
		func(s *v1.Service) { s.Annotations = nil },
		func(s *v1.Service) { s.CreationTimestamp = metav1.Time{} },
		func(s *v1.Service) { s.Spec.Type = "" },
		func(s *v1.Service) { s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = "", nil },
		func(s *v1.Service) { s.Spec.SessionAffinityConfig = nil },
		func(s *v1.Service) { s.Spec.InternalTrafficPolicy = nil },
		func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = "" },
		func(s *v1.Service) { s.Spec.HealthCheckNodePort = 0 },
		func(s *v1.Service) { s.Spec.ClusterIPs = nil },
	)
	for i := range s.Spec.Ports {
		add(
			func(s *v1.Service) { s.Spec.Ports[i].NodePort = 0 },
			func(s *v1.Service) { s.Spec.Ports[i].AppProtocol = nil },
			func(s *v1.Service) { s.Spec.Ports[i].Protocol = "" },
		)
	}
	for i := range s.Status.LoadBalancer.Ingress {
		add(func(s *v1.Service) {
			s.Status.LoadBalancer.Ingress[i].Ports, s.Status.LoadBalancer.Ingress[i].IPMode = nil, nil
		})
	}
	return changes
}

func sliceChanges(s *discoveryv1.EndpointSlice) (changes []func(*discoveryv1.EndpointSlice)) {
	add := func(list ...func(*discoveryv1.EndpointSlice)) { changes = append(changes, list...) }
	add(without(len(s.Endpoints), func(s *discoveryv1.EndpointSlice) *[]discoveryv1.Endpoint { return &s.Endpoints })...)
	add(without(len(s.Ports), func(s *discoveryv1.EndpointSlice) *[]discoveryv1.EndpointPort { return &s.Ports })...)
	add(func(s *discoveryv1.EndpointSlice) { delete(s.Labels, proxier.LabelHeadless) })
	for i := range s.Endpoints {
		add(
			func(s *discoveryv1.EndpointSlice) { s.Endpoints[i].Conditions = discoveryv1.EndpointConditions{} },
			func(s *discoveryv1.EndpointSlice) { s.Endpoints[i].Conditions.Ready = nil },
			func(s *discoveryv1.EndpointSlice) { s.Endpoints[i].Conditions.Serving = nil },
			func(s *discoveryv1.EndpointSlice) { s.Endpoints[i].Conditions.Terminating = nil },
			func(s *discoveryv1.EndpointSlice) { s.Endpoints[i].NodeName = nil },
			func(s *discoveryv1.EndpointSlice) { s.Endpoints[i].Hints = nil },
		)
		if h := s.Endpoints[i].Hints; h != nil {
			add(without(len(h.ForZones), func(s *discoveryv1.EndpointSlice) *[]discoveryv1.ForZone { return &s.Endpoints[i].Hints.ForZones })...)
			add(without(len(h.ForNodes), func(s *discoveryv1.EndpointSlice) *[]discoveryv1.ForNode { return &s.Endpoints[i].Hints.ForNodes })...)
		}
	}
	for i := range s.Ports {
		add(func(s *discoveryv1.EndpointSlice) { s.Ports[i].Protocol = nil })
	}
	return changes
}

// The defaults of a scenario.
var (
	plainNodeIPs    = [proxier.Families]netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("fd00:18::1")}
	plainLocalAddrs = []netip.Addr{
		netip.MustParseAddr("10.244.1.254"), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("172.18.0.1"),
		netip.IPv6Loopback(), netip.MustParseAddr("fd00:10:244:1::ffff"), netip.MustParseAddr("fd00:18::1"),
	}
)

var plainUplinks = []string{"eth0"}

// Changes of facts and policy return whether they had an effect.
var simplerFacts = []func(*proxier.Facts) bool{
	func(f *proxier.Facts) bool { return become(&f.Zone, "") },
	func(f *proxier.Facts) bool {
		was := f.Labels
		f.Labels = nil
		return was != nil
	},
	func(f *proxier.Facts) bool { return become(&f.NodeIPs, plainNodeIPs) },
	func(f *proxier.Facts) bool { return become(&f.LocalAddrs, plainLocalAddrs) },
	func(f *proxier.Facts) bool {
		list := slices.Concat(f.LocalAddrs, plainLocalAddrs)
		slices.SortFunc(list, netip.Addr.Compare)
		return become(&f.LocalAddrs, slices.Compact(list))
	},
	func(f *proxier.Facts) bool {
		return become(&f.Pods, proxier.Detector{CIDRs: scenarios.DefaultConfig().Detect.CIDRs})
	},
	func(f *proxier.Facts) bool { return become(&f.Uplinks, plainUplinks) },
	func(f *proxier.Facts) bool { return len(f.Pods.CIDRs) < 2 && become(&f.Pods, proxier.Detector{}) },
	func(f *proxier.Facts) bool { return become(&f.ServiceCIDRs, scenarios.DefaultConfig().ServiceCIDRs) },
}

var simplerPolicy = []func(*proxier.Policy, *settings) bool{
	func(p *proxier.Policy, _ *settings) bool { return become(&p.MasqueradeAll, false) },
	func(p *proxier.Policy, _ *settings) bool { return become(&p.IgnoreExternalIPs, false) },
	func(p *proxier.Policy, _ *settings) bool { return become(&p.StrictSourceRanges, false) },
	func(p *proxier.Policy, s *settings) bool {
		p.NodePorts = proxier.NodePortSelector{Loopback: p.NodePorts.Loopback}
		return become(&s.nodePortAddresses, nil)
	},
	func(p *proxier.Policy, s *settings) bool {
		p.NodePorts.Loopback = false
		return become(&s.localhostNodePorts, false)
	},
}

func become[T any](v *T, to T) bool {
	if reflect.DeepEqual(*v, to) {
		return false
	}
	*v = to
	return true
}

// simplerFlows come from sources that a scenario can have, best first.
func simplerFlows(f proxier.Flow, localAddrs []netip.Addr) []proxier.Flow {
	if !f.Destination.IsValid() {
		return nil
	}
	family := family(f.Destination.Addr())
	from := func(addr netip.Addr, device string) proxier.Flow {
		return proxier.Flow{Source: netip.AddrPortFrom(addr, 0), Destination: f.Destination, Protocol: f.Protocol, Device: device}
	}
	host := plainNodeIPs[family]
	if dst := f.Destination.Addr(); dst.IsLoopback() || slices.Contains(localAddrs, dst) || slices.Contains(plainLocalAddrs, dst) {
		host = dst // a host's connections to itself have equal source and destination addresses
	}
	return []proxier.Flow{
		from(netip.MustParseAddr(clientPool[family][0]), "eth0"),
		from(netip.MustParseAddr(podPool[family][0]), "pod1"),
		from(host, ""),
		f,
	}
}
