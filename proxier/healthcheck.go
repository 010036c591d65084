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
	// Ready counts the distinct addresses of ready endpoints on this node; what
	// terminates is not counted.
	Ready [Families]int
}

// HealthChecks are those of all Services that have one.
func (t *Table) HealthChecks() map[types.NamespacedName]HealthCheck {
	t.mu.RLock()
	defer t.mu.RUnlock()
	all := make(map[types.NamespacedName]HealthCheck, len(t.health))
	for name, h := range t.health {
		all[name] = h
	}
	return all
}

func (s *Service) hasHealthCheck() bool {
	return s != nil && s.More != nil && s.More.HealthCheckNodePort != 0
}

func (t *Table) checkHealth(c *Change) {
	name, s := c.entry.name, c.Service
	if !s.hasHealthCheck() {
		if c.entry.decided.service.hasHealthCheck() {
			delete(t.health, name)
		}
		return
	}
	h := HealthCheck{UID: s.UID, Port: s.More.HealthCheckNodePort}
	seen := map[netip.Addr]struct{}{}
	for _, slice := range c.Slices {
		if len(slice.ports) == 0 || !s.ClusterIPs[slice.family].IsValid() {
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
	t.health[name] = h
}

func sortedNames[V any](m map[types.NamespacedName]V) []types.NamespacedName {
	return slices.SortedFunc(maps.Keys(m), func(a, b types.NamespacedName) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
}
