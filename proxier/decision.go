// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Kind says why an address is a frontend.
type Kind uint8

// The kinds of frontends.
const (
	ClusterIP Kind = iota + 1
)

func (k Kind) String() string {
	if k == ClusterIP {
		return "ClusterIP"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// Scope says where a frontend is dialled from.
type Scope uint8

// The scopes of frontends.
const (
	Internal Scope = iota // this node and its pods
	External              // elsewhere
)

func (s Scope) String() string {
	if s == Internal {
		return "internal"
	}
	return "external"
}

// Set names one of the backend sets of a service port.
type Set uint8

// The sets of a service port. Frontends with the same eligible backends share
// one.
const (
	V4Cluster Set = iota
	V4Local
	V6Cluster
	V6Local
	Sets
)

func setOf(f Family, onlyLocal bool) Set {
	s := Set(f) * 2
	if onlyLocal {
		s++
	}
	return s
}

// Family of the backends in the set.
func (s Set) Family() Family { return Family(s / 2) }

// Member is the set's bit in Backend.Members.
func (s Set) Member() Members { return 1 << (s & 1) }

func (s Set) String() string {
	kind := "cluster"
	if s&1 != 0 {
		kind = "local"
	}
	return strings.ToLower(s.Family().String()) + "/" + kind
}

// Members says in which sets of its family a backend is.
type Members uint8

// The sets a backend can be in. Without any, it is kept only because clients
// that have it keep it.
const (
	InCluster Members = 1 << iota
	InLocal
)

// Verdict says what happens to a connection to a set without backends.
type Verdict uint8

// The verdicts.
const (
	Reject Verdict = iota // the client is told at once
	Drop                  // silence
)

func (v Verdict) String() string {
	if v == Reject {
		return "reject"
	}
	return "drop"
}

// Frontend is an address and port that clients dial.
type Frontend struct {
	Addr  netip.AddrPort
	Kind  Kind
	Scope Scope
	Set   Set
	// Conflict names the service port that has this address; the frontend is
	// not served while it does.
	Conflict *ServicePortName
}

// Backend is an endpoint that a service port uses.
type Backend struct {
	Addr        netip.AddrPort
	Members     Members
	Local       bool
	Terminating bool
}

// Decision is everything a tier needs to know of one service port. It is
// immutable, and a pure function of the Service, its slices and the node's
// facts, but for Frontend.Conflict, which depends on the other Services.
type Decision struct {
	Name      ServicePortName
	UID       types.UID // of the Service, for Events alone
	Created   time.Time
	Affinity  time.Duration
	Frontends []Frontend
	// Backends are sorted by address, without duplicates.
	Backends []Backend
	// Empty is the verdict of each set for when it has no backend.
	Empty [Sets]Verdict

	index uint32
	// The usual service port has one frontend; this saves it an allocation.
	oneFrontend [1]Frontend
}

// Index is a small number that identifies the service port while it lives. It
// is given anew when it is gone.
func (d *Decision) Index() uint32 { return d.index }

// Size counts the backends of a set.
func (d *Decision) Size(s Set) int {
	n := 0
	for i := range d.Backends {
		if b := &d.Backends[i]; b.Members&s.Member() != 0 && familyOf(b.Addr.Addr()) == s.Family() {
			n++
		}
	}
	return n
}

// String is the decision as text, for logs, people and tests.
func (d *Decision) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", d.Name, d.Name.Protocol)
	if d.Affinity > 0 {
		fmt.Fprintf(&b, " affinity=%v", d.Affinity)
	}
	b.WriteByte('\n')
	var used [Sets]bool
	for _, f := range d.Frontends {
		used[f.Set] = true
		fmt.Fprintf(&b, "  frontend %s %s %s set=%s", f.Addr, f.Kind, f.Scope, f.Set)
		if f.Conflict != nil {
			fmt.Fprintf(&b, " held-by=%s", f.Conflict)
		}
		b.WriteByte('\n')
	}
	for s := range Sets {
		if !used[s] {
			continue
		}
		fmt.Fprintf(&b, "  set %s", s)
		if d.Size(s) == 0 {
			fmt.Fprintf(&b, " empty=%s", d.Empty[s])
		}
		b.WriteByte('\n')
	}
	for _, e := range d.Backends {
		fmt.Fprintf(&b, "  backend %s", e.Addr)
		for _, m := range []struct {
			on   bool
			name string
		}{
			{e.Members&InCluster != 0, "cluster"}, {e.Members&InLocal != 0, "local"},
			{e.Members == 0, "retained"}, {e.Local, "on-node"}, {e.Terminating, "terminating"},
		} {
			if m.on {
				b.WriteByte(' ')
				b.WriteString(m.name)
			}
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func (d *Decision) equal(o *Decision) bool {
	if d.Name != o.Name || d.Created != o.Created || d.Affinity != o.Affinity || d.Empty != o.Empty ||
		len(d.Frontends) != len(o.Frontends) || len(d.Backends) != len(o.Backends) {
		return false
	}
	for i := range d.Frontends {
		a, b := d.Frontends[i], o.Frontends[i]
		if (a.Conflict == nil) != (b.Conflict == nil) || a.Conflict != nil && *a.Conflict != *b.Conflict {
			return false
		}
		a.Conflict, b.Conflict = nil, nil
		if a != b {
			return false
		}
	}
	for i := range d.Backends {
		if d.Backends[i] != o.Backends[i] {
			return false
		}
	}
	return true
}
