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

// Tier observes the decisions that pass through it, for metrics about them.
func (m *Metrics) Tier(next proxier.Tier) proxier.Tier { return &tier{next, m} }

type tier struct {
	proxier.Tier
	m *Metrics
}

func (t *tier) Sync(ctx context.Context, update proxier.Update) error {
	t.m.observe(update)
	return t.Tier.Sync(ctx, update)
}

// noLocal has one bit per policy and family. A bit is set if the policy restricts the
// service port to this node, and the service port has endpoints, but none on this node.
type noLocal uint8

// policies are the values of label traffic_policy.
var policies = [...]string{"internal", "external"}

// noLocalBits is the number of bits in noLocal.
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

// observe records the service ports with a bit set, and the number of each bit. Service
// ports without one cost no memory, and the cost of a change does not depend on their
// number.
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
