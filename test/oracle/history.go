// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"cmp"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

// history is the input of a table: facts, policy, and steps.
type history struct {
	facts    proxier.Facts
	policy   proxier.Policy
	settings settings
	steps    []step
}

// now returns the facts after the last step.
func (h *history) now() proxier.Facts {
	f := h.facts
	for _, st := range h.steps {
		if st.facts != nil {
			f = *st.facts
		}
	}
	return f
}

// step is a set of changes that take effect together.
type step struct {
	facts  *proxier.Facts // nil if unchanged
	events []event
}

// event is the new state of one object, or its deletion.
type event struct {
	service *v1.Service
	slice   *discoveryv1.EndpointSlice
	gone    bool
}

// objects are the existing objects.
type objects struct {
	services map[types.NamespacedName]*v1.Service
	slices   map[types.NamespacedName]*discoveryv1.EndpointSlice
}

func newObjects() objects {
	return objects{map[types.NamespacedName]*v1.Service{}, map[types.NamespacedName]*discoveryv1.EndpointSlice{}}
}

func (o *objects) cluster(facts proxier.Facts, policy proxier.Policy) *Cluster {
	c := &Cluster{NodeName: ownNode, Facts: facts, Policy: policy}
	for _, name := range sorted(o.services) {
		c.Services = append(c.Services, o.services[name])
	}
	for _, name := range sorted(o.slices) {
		c.Slices = append(c.Slices, o.slices[name])
	}
	return c
}

func sliceName(s *discoveryv1.EndpointSlice) types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
}

func sorted[V any](m map[types.NamespacedName]V) []types.NamespacedName {
	return slices.SortedFunc(maps.Keys(m), func(a, b types.NamespacedName) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
}

// handler receives events of objects.
type handler interface {
	proxier.ServiceHandler
	proxier.EndpointSliceHandler
}

// tell records an event and passes it to the handler. It ignores deletions of objects that
// do not exist.
func (o *objects) tell(h handler, e event) {
	switch {
	case e.service != nil:
		name := nameOf(e.service)
		old := o.services[name]
		switch {
		case e.gone:
			if old != nil {
				h.OnServiceDelete(old)
				delete(o.services, name)
			}
			return
		case old == nil:
			h.OnServiceAdd(e.service)
		default:
			h.OnServiceUpdate(old, e.service)
		}
		o.services[name] = e.service
	case e.slice != nil:
		name := sliceName(e.slice)
		old := o.slices[name]
		switch {
		case e.gone:
			if old != nil {
				h.OnEndpointSliceDelete(old)
				delete(o.slices, name)
			}
			return
		case old == nil:
			h.OnEndpointSliceAdd(e.slice)
		default:
			h.OnEndpointSliceUpdate(old, e.slice)
		}
		o.slices[name] = e.slice
	}
}

// player plays a history on a subject.
type player struct {
	h     history
	s     subject
	there objects
	facts proxier.Facts
}

func newPlayer(h history, proxied bool, tier Tier) *player {
	p := &player{h: h, there: newObjects(), facts: h.facts}
	if p.s = newDirect(&h); proxied {
		p.s = newWhole(&h, tier)
	}
	return p
}

func (p *player) play(st step) {
	for _, e := range st.events {
		p.there.tell(p.s, e)
	}
	if st.facts != nil {
		p.facts = *st.facts
		p.s.setFacts(p.facts)
	}
	p.s.sync()
}

func (p *player) cluster() *Cluster { return p.there.cluster(p.facts, p.h.policy) }
