// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// BackendUse is a service port that has an endpoint, and why the endpoint is in its sets or is not.
type BackendUse struct {
	Name           ServicePortName
	Addr           netip.AddrPort
	Cluster, Local Why
	// Others counts the other endpoints of its family that are in the cluster set.
	Others int
}

// FindBackend returns the service ports of a Service, or of all if it is empty, that have an endpoint with an address, and
// a port unless that is 0. They are sorted by name, then by the endpoint's port.
func (t *Table) FindBackend(addr netip.Addr, port uint16, of types.NamespacedName) (list []BackendUse) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for i := range t.rows {
		r := &t.rows[i]
		if r.decision == nil || of.Name != "" && r.decision.Name.NamespacedName != of || !slices.ContainsFunc(r.of.decided.slices, func(s *EndpointSlice) bool { return s.has(addr) }) {
			continue
		}
		judged, in := t.judge(r, FamilyOf(addr)), 0
		cluster := SetOf(FamilyOf(addr), false)
		for i := range judged {
			if judged[i].In(cluster) {
				in++
			}
		}
		for i := range judged {
			j := &judged[i]
			if j.Addr.Addr() != addr || port != 0 && j.Addr.Port() != port || j.Duplicate {
				continue
			}
			u := BackendUse{Name: r.decision.Name, Addr: j.Addr, Cluster: j.Cluster, Local: j.Local, Others: in}
			if j.In(cluster) {
				u.Others--
			}
			list = append(list, u)
		}
	}
	slices.SortStableFunc(list, func(a, b BackendUse) int { return a.Name.compare(b.Name) })
	return list
}

// has reports whether a slice has an endpoint with that address.
func (s *EndpointSlice) has(addr netip.Addr) bool {
	_, found := slices.BinarySearchFunc(s.endpoints, addr, func(e Endpoint, a netip.Addr) int { return e.Addr.Compare(a) })
	return found
}
