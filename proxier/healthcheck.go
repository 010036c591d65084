// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// HealthCheck is what a load balancer asks of a Service with
// externalTrafficPolicy: Local at its healthCheckNodePort.
type HealthCheck struct {
	UID  types.UID
	Port uint16
	// Ready counts the distinct addresses of ready endpoints on this node, by the family of
	// the address that is asked. Where the Service has one family, that counts for both:
	// load balancers ask the addresses of nodes, not of Services.
	Ready [Families]int
}

// HealthCheckChange is a change of the health check of one Service. Check is nil if it was
// removed.
type HealthCheckChange struct {
	Service types.NamespacedName
	Check   *HealthCheck
}

// HealthChecks returns the health checks of all Services that have one.
func (t *Table) HealthChecks() map[types.NamespacedName]HealthCheck {
	t.mu.RLock()
	defer t.mu.RUnlock()
	all := make(map[types.NamespacedName]HealthCheck, len(t.health))
	for name, h := range t.health {
		all[name] = h
	}
	return all
}

// takeHealthChecks returns the changes since its last call.
func (t *Table) takeHealthChecks() (changes []HealthCheckChange) {
	for _, name := range sortedNames(t.checked) {
		c := HealthCheckChange{Service: name}
		if h, ok := t.health[name]; ok {
			c.Check = &h
		}
		changes = append(changes, c)
	}
	clear(t.checked)
	return changes
}

func (s *Service) hasHealthCheck() bool { return s.healthCheckNodePort() != 0 }

func (s *Service) healthCheckNodePort() uint16 {
	if s == nil || s.More == nil {
		return 0
	}
	return s.More.HealthCheckNodePort
}

func (t *Table) checkHealth(c *Change) {
	name, s := c.entry.name, c.Service
	if !s.hasHealthCheck() {
		if c.entry.decided.service.hasHealthCheck() {
			delete(t.health, name)
			t.checked[name] = struct{}{}
		}
		return
	}
	h := HealthCheck{UID: s.UID, Port: s.More.HealthCheckNodePort}
	for f := range Families {
		if s.ClusterIPs[f].IsValid() && s.More.external(t.facts.Labels) {
			h.Ready[f] = t.readyHere(name, c.Slices, f)
		}
	}
	for f := range Families {
		if !s.ClusterIPs[f].IsValid() {
			h.Ready[f] = h.Ready[1-f]
		}
	}
	if was, had := t.health[name]; !had || was != h {
		t.health[name] = h
		t.checked[name] = struct{}{}
	}
}

// readyHere counts the addresses of a family on this node at which some port of an endpoint is
// ready. Endpoints that terminate are ready where publishNotReadyAddresses says so, and those that an operator
// withdraws are not.
func (t *Table) readyHere(service types.NamespacedName, from []*EndpointSlice, family Family) int {
	const here = ready | onNode
	local := map[netip.Addr]struct{}{}
	for _, slice := range from {
		if slice.family != family || len(slice.ports) == 0 {
			continue
		}
		for i := range slice.endpoints {
			if e := &slice.endpoints[i]; e.flags&here == here {
				local[e.Addr] = struct{}{}
			}
		}
	}
	count := 0
	for addr := range local {
		ports, flags := copiesThatCount(from, family, addr)
		for i := range ports {
			overridden := flags[i]
			for o := range t.facts.Overrides {
				if o := &t.facts.Overrides[o]; o.Concerns(netip.AddrPortFrom(addr, ports[i].port), service) {
					overridden = overridden.in(o.State)
				}
			}
			if overridden&here == here {
				count++
				break
			}
		}
	}
	return count
}

// copiesThatCount returns the ports of an address and the flags for each, after a choice among
// copies in several slices.
func copiesThatCount(from []*EndpointSlice, family Family, addr netip.Addr) (ports []endpointPort, flags []endpointFlags) {
	for _, slice := range from {
		if slice.family != family {
			continue
		}
		at, found := slices.BinarySearchFunc(slice.endpoints, addr, func(e Endpoint, a netip.Addr) int { return e.Addr.Compare(a) })
		for ; found && at < len(slice.endpoints) && slice.endpoints[at].Addr == addr; at++ {
			f := slice.endpoints[at].flags
			for _, port := range slice.ports {
				if i := slices.Index(ports, port); i < 0 {
					ports, flags = append(ports, port), append(flags, f)
				} else if f.better(flags[i]) {
					flags[i] = f
				}
			}
		}
	}
	return ports, flags
}

func sortedNames[V any](m map[types.NamespacedName]V) []types.NamespacedName {
	return slices.SortedFunc(maps.Keys(m), func(a, b types.NamespacedName) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
}
