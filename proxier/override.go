// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// BackendState is what an operator says of a backend.
type BackendState uint8

// The states. In none of them the existing connections end.
const (
	// ActiveState is that of a backend of which no operator says anything.
	ActiveState BackendState = iota
	// MaintenanceState backends get no new connections, as those of weight 0.
	MaintenanceState
	// QuarantinedState backends get no new connections while any other one takes them.
	QuarantinedState
)

var backendStates = [...]string{"active", "maintenance", "quarantined"}

func (s BackendState) String() string { return backendStates[s] }

// MarshalText implements encoding.TextMarshaler.
func (s BackendState) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. It refuses active: a backend without an entry is active.
func (s *BackendState) UnmarshalText(text []byte) error {
	i := slices.Index(backendStates[:], string(text))
	if i <= int(ActiveState) {
		return fmt.Errorf("unknown state %.32q: want %s or %s", text, MaintenanceState, QuarantinedState)
	}
	*s = BackendState(i)
	return nil
}

// BackendOverride is what an operator says of a backend, on this node alone. Of several that concern one backend, the one for
// a Service counts, then the one for a port.
type BackendOverride struct {
	Addr netip.Addr
	// Port is 0 for all ports.
	Port uint16
	// Service is empty for all Services.
	Service types.NamespacedName
	State   BackendState
	// Until is when it ends, which its owner sees to; zero for never.
	Until time.Time
}

// Compare sorts by precedence, the first one counts.
func (o *BackendOverride) Compare(p *BackendOverride) int {
	return cmp.Or(
		-cmp.Compare(o.Service.Name, p.Service.Name), -cmp.Compare(o.Service.Namespace, p.Service.Namespace),
		-cmp.Compare(o.Port, p.Port), o.Addr.Compare(p.Addr), cmp.Compare(o.State, p.State))
}

// Concerns reports whether it is about a backend of a Service.
func (o *BackendOverride) Concerns(backend netip.AddrPort, of types.NamespacedName) bool {
	return o.Addr == backend.Addr() && (o.Port == 0 || o.Port == backend.Port()) && (o.Service == types.NamespacedName{} || o.Service == of)
}

// override applies what operators say to the endpoints of a Service, sorted by address, and reports whether any is
// quarantined. The list is copied if kept says that it is not the caller's.
func override(list []candidate, by []BackendOverride, of types.NamespacedName, kept bool) (_ []candidate, quarantined bool) {
	for i := range by {
		o := &by[i]
		at := sort.Search(len(list), func(i int) bool { return list[i].addr.Addr().Compare(o.Addr) >= 0 })
		for ; at < len(list) && list[at].addr.Addr() == o.Addr; at++ {
			flags := list[at].flags.in(o.State)
			if flags == list[at].flags || !o.Concerns(list[at].addr, of) {
				continue
			}
			if kept {
				list, kept = slices.Clone(list), false
			}
			list[at].flags = flags
			quarantined = quarantined || flags&isQuarantined != 0
		}
	}
	return list, quarantined
}

// in returns the flags of an endpoint in a state, unless it is in one already.
func (f endpointFlags) in(s BackendState) endpointFlags {
	switch {
	case f&(maintenance|isQuarantined) != 0:
	case s == MaintenanceState:
		return f&^ready | maintenance
	case s == QuarantinedState && (f&ready != 0 || f&terminating != 0 && f&serving != 0):
		return f&^ready | isQuarantined
	}
	return f
}

// lastResort says that quarantined endpoints are all that can serve, of those with these flags.
func lastResort(from []candidate, with endpointFlags) bool {
	found := false
	for i := range from {
		c := &from[i]
		if !c.is(with) {
			continue
		}
		if c.is(ready) || c.is(terminating|serving) && c.flags&(maintenance|isQuarantined) == 0 {
			return false
		}
		found = found || c.is(isQuarantined)
	}
	return found
}
