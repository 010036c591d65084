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

func (n *noLocal) set(policy int, f proxier.Family)     { *n |= 1 << (2*policy + int(f)) }
func (n noLocal) has(policy int, f proxier.Family) bool { return n&(1<<(2*policy+int(f))) != 0 }

func noLocalOf(d *proxier.Decision) (found noLocal) {
	for i := range d.Frontends {
		f := &d.Frontends[i]
		set := f.Routes[proxier.FromOutside].Set
		if d.Empty[set] != proxier.Drop || d.Size(set) > 0 {
			continue
		}
		policy := 0
		if f.Kind != proxier.ClusterIP {
			policy = 1
		}
		found.set(policy, set.Family())
	}
	return found
}

// observe keeps what differs from the usual, by index; a service port of which
// nothing is kept costs nothing.
func (m *Metrics) observe(update proxier.Update) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if update.Full {
		clear(m.noLocal)
	}
	for _, c := range update.Changes {
		var found noLocal
		if c.New != nil {
			found = noLocalOf(c.New)
		}
		if found != 0 {
			m.noLocal[c.Index()] = found
		} else {
			delete(m.noLocal, c.Index())
		}
	}
	for policy, name := range policies {
		for family := range proxier.Families {
			n := 0
			for _, found := range m.noLocal {
				if found.has(policy, family) {
					n++
				}
			}
			if slices.Contains(m.families, family.String()) {
				m.noLocalEndpoints.WithLabelValues(name, family.String()).Set(float64(n))
			}
		}
	}
}
