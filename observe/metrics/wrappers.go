// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"slices"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// Handler counts the changes that pass through it.
func (m *Metrics) Handler(next proxier.Handler) proxier.Handler { return &handler{next, m} }

type handler struct {
	proxier.Handler
	m *Metrics
}

func (h *handler) OnServiceAdd(service *v1.Service) {
	h.m.serviceTotal.Inc()
	h.Handler.OnServiceAdd(service)
}

func (h *handler) OnServiceUpdate(old, service *v1.Service) {
	h.m.serviceTotal.Inc()
	h.Handler.OnServiceUpdate(old, service)
}

func (h *handler) OnServiceDelete(service *v1.Service) {
	h.m.serviceTotal.Inc()
	h.Handler.OnServiceDelete(service)
}

func (h *handler) OnEndpointSliceAdd(slice *discoveryv1.EndpointSlice) {
	h.m.endpointTotal.Inc()
	h.Handler.OnEndpointSliceAdd(slice)
}

func (h *handler) OnEndpointSliceUpdate(old, slice *discoveryv1.EndpointSlice) {
	h.m.endpointTotal.Inc()
	h.Handler.OnEndpointSliceUpdate(old, slice)
}

func (h *handler) OnEndpointSliceDelete(slice *discoveryv1.EndpointSlice) {
	h.m.endpointTotal.Inc()
	h.Handler.OnEndpointSliceDelete(slice)
}

// Tier watches the decisions that pass through it, for metrics about them.
func (m *Metrics) Tier(next proxier.Tier) proxier.Tier { return &tier{next, m} }

type tier struct {
	proxier.Tier
	m *Metrics
}

func (t *tier) Sync(ctx context.Context, update proxier.Update) error {
	t.m.observe(update)
	return t.Tier.Sync(ctx, update)
}

// noLocal says in which families a service port that a traffic policy restricts
// to this node has no endpoint on it, though it has some elsewhere: one bit per
// policy and family.
type noLocal uint8

// policies are the values of the label traffic_policy.
var policies = [...]string{"internal", "external"}

// noLocalBits is one for each policy and family.
const noLocalBits = len(policies) * int(proxier.Families)

func noLocalBit(policy int, f proxier.Family) int { return policy*int(proxier.Families) + int(f) }

func noLocalOf(d *proxier.Decision) (found noLocal) {
	for i := range d.Frontends {
		f := &d.Frontends[i]
		set := f.Routes[proxier.FromOutside].Set
		if d.Empty[set] != proxier.Drop || d.Size(set) > 0 {
			continue
		}
		policy := 0
		if f.Kind.External() {
			policy = 1
		}
		found |= 1 << noLocalBit(policy, set.Family())
	}
	return found
}

// observe keeps what differs from the usual, by index, and how often it does. A
// service port of which nothing is kept costs nothing, and a change costs the
// same however many are kept.
func (m *Metrics) observe(update proxier.Update) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.noLocalCounts
	if update.Full {
		clear(m.noLocal)
		m.noLocalCounts = [noLocalBits]int{}
	}
	for _, c := range update.Changes {
		var found noLocal
		if c.New != nil {
			found = noLocalOf(c.New)
		}
		was := m.noLocal[c.Index()]
		if was == found {
			continue
		}
		for bit := range noLocalBits {
			m.noLocalCounts[bit] += int(found>>bit&1) - int(was>>bit&1)
		}
		if found != 0 {
			m.noLocal[c.Index()] = found
		} else {
			delete(m.noLocal, c.Index())
		}
	}
	if m.noLocalCounts == before {
		return
	}
	for policy, name := range policies {
		for family := range proxier.Families {
			if slices.Contains(m.families, family.String()) {
				n := m.noLocalCounts[noLocalBit(policy, family)]
				m.noLocalEndpoints.WithLabelValues(name, family.String()).Set(float64(n))
			}
		}
	}
}
