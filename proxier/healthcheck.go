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
	// Families in which the Service has an address.
	Families [Families]bool
	// Ready counts the distinct addresses of ready endpoints on this node; what
	// terminates is not counted.
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
		h.Families[f] = s.ClusterIPs[f].IsValid()
	}
	seen := map[netip.Addr]struct{}{}
	for _, slice := range c.Slices {
		if len(slice.ports) == 0 || !h.Families[slice.family] {
			continue
		}
		for i := range slice.endpoints {
			e := &slice.endpoints[i]
			if e.flags&(ready|onNode|terminating) != ready|onNode {
				continue
			}
			if _, counted := seen[e.Addr]; !counted {
				seen[e.Addr] = struct{}{}
				h.Ready[slice.family]++
			}
		}
	}
	if was, had := t.health[name]; !had || was != h {
		t.health[name] = h
		t.checked[name] = struct{}{}
	}
}

// HealthCheckAddrs are where health checks of a family are answered: at the addresses at
// which NodePorts are served, or at the unspecified one if that is all of them.
func (r *NodeRules) HealthCheckAddrs(f Family) (list []netip.Addr) {
	if r.AllNodePortAddrs[f] {
		return []netip.Addr{unspecified[f]}
	}
	for _, a := range r.LocalAddrs {
		// A link-local address means nothing without its device.
		if FamilyOf(a) == f && !a.IsLinkLocalUnicast() && r.servesNodePort(a, FromHost) {
			list = append(list, a)
		}
	}
	return list
}

func sortedNames[V any](m map[types.NamespacedName]V) []types.NamespacedName {
	return slices.SortedFunc(maps.Keys(m), func(a, b types.NamespacedName) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
}
