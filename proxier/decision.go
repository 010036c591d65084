// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Verdict says what happens to a connection to a set without backends.
type Verdict uint8

// The verdicts.
const (
	Reject Verdict = iota // the client gets an error at once
	Drop                  // packets are dropped silently
)

func (v Verdict) String() string {
	if v == Reject {
		return "reject"
	}
	return "drop"
}

// Backend is an endpoint that a service port uses.
type Backend struct {
	Addr    netip.AddrPort
	Members Members
	// Local backends are on this node, Remote ones on another. With neither, which is what
	// slices without nodeName say, only routes tell.
	Local, Remote bool
	Terminating   bool
	// Weight is its share of new connections, in proportion to that of others.
	Weight uint16
}

// In reports whether the backend is in a set.
func (b *Backend) In(s Set) bool {
	return b.Members&s.Member() != 0 && FamilyOf(b.Addr.Addr()) == s.Family()
}

// Decision is everything a tier needs to know of one service port. It is
// immutable, and a pure function of the Service, its slices and the node's
// facts, but for Frontend.Conflict, which depends on the other Services.
type Decision struct {
	Name      ServicePortName
	UID       types.UID // of the Service, for Events
	Created   Seconds
	Affinity  time.Duration
	Balancing Balancing
	// OptedOut says that a fast tier must not serve it if another one can.
	OptedOut bool
	// Weighted says that backends have different weights.
	Weighted bool
	// HealthCheckNodePort is where this process answers load balancers about the Service; 0
	// for nowhere. A tier that has rules lets the packets in.
	HealthCheckNodePort uint16
	// Empty is the verdict of each set for when it has no backend.
	Empty     [Sets]Verdict
	Frontends []Frontend
	// Backends are sorted by address, without duplicates.
	Backends []Backend

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
		if d.Backends[i].In(s) {
			n++
		}
	}
	return n
}

// Uses says which sets the decision's frontends lead to.
func (d *Decision) Uses() (used [Sets]bool) {
	for i := range d.Frontends {
		for _, r := range d.Frontends[i].Routes {
			used[r.Set] = true
		}
	}
	return used
}

// String is the decision as text, for logs, people and tests.
func (d *Decision) String() string {
	var b strings.Builder
	d.head(&b)
	for i := range d.Backends {
		fmt.Fprintf(&b, "  backend %s\n", &d.Backends[i])
	}
	return b.String()
}

// head writes all but the backends.
func (d *Decision) head(b *strings.Builder) {
	fmt.Fprintf(b, "%s %s", d.Name, d.Name.Protocol)
	if d.Affinity > 0 {
		fmt.Fprintf(b, " affinity=%v", d.Affinity)
	}
	if d.OptedOut {
		b.WriteString(" opted-out")
	}
	if d.Balancing.Algorithm == Maglev {
		b.WriteString(" maglev")
		if size := d.Balancing.TableSize; size != 0 {
			fmt.Fprintf(b, "=%d", size)
		}
	}
	if d.HealthCheckNodePort != 0 {
		fmt.Fprintf(b, " health-check=%d", d.HealthCheckNodePort)
	}
	b.WriteByte('\n')
	for i := range d.Frontends {
		fmt.Fprintf(b, "  frontend %s\n", &d.Frontends[i])
	}
	for s, used := range d.Uses() {
		if used && d.Size(Set(s)) == 0 {
			fmt.Fprintf(b, "  set %s empty=%s\n", Set(s), d.Empty[s])
		}
	}
}

// String is the backend as text: "10.244.0.1:8080 cluster,local on-node".
func (e *Backend) String() string {
	words := []string{e.Addr.String()}
	switch e.Members {
	case InCluster:
		words = append(words, "cluster")
	case InLocal:
		words = append(words, "local")
	case InCluster | InLocal:
		words = append(words, "cluster,local")
	default:
		words = append(words, "retained")
	}
	if e.Local {
		words = append(words, "on-node")
	}
	if e.Terminating {
		words = append(words, "terminating")
	}
	if e.Weight != DefaultWeight {
		words = append(words, fmt.Sprintf("weight=%d", e.Weight))
	}
	return strings.Join(words, " ")
}

// Only returns the decision with only those frontends for which keep returns true; nil if
// there are none.
func (d *Decision) Only(keep func(*Frontend) bool) *Decision {
	var kept []Frontend
	for i := range d.Frontends {
		if keep(&d.Frontends[i]) {
			kept = append(kept, d.Frontends[i])
		}
	}
	switch len(kept) {
	case 0:
		return nil
	case len(d.Frontends):
		return d
	}
	only := *d
	only.Frontends = kept
	return &only
}

// servedElsewhere is for frontends of which a tier has to know that another one serves them.
var servedElsewhere = &Left{Sockets: true, Why: "rules or another kube-proxy of this node serve it"}

// LeaveBut returns the decision with all frontends left to other tiers but those for which keep returns true.
func (d *Decision) LeaveBut(keep func(*Frontend) bool) *Decision {
	left := *d
	left.Frontends = slices.Clone(d.Frontends)
	for i := range left.Frontends {
		if f := &left.Frontends[i]; !f.IsLeft() && !keep(f) {
			f.Left = servedElsewhere
		}
	}
	return &left
}

func (d *Decision) equal(o *Decision) bool {
	if d.Name != o.Name || d.UID != o.UID || d.Created != o.Created || d.Affinity != o.Affinity || d.OptedOut != o.OptedOut || d.Balancing != o.Balancing || d.Weighted != o.Weighted ||
		d.HealthCheckNodePort != o.HealthCheckNodePort || d.Empty != o.Empty ||
		len(d.Frontends) != len(o.Frontends) || len(d.Backends) != len(o.Backends) {
		return false
	}
	for i := range d.Frontends {
		if !d.Frontends[i].equal(&o.Frontends[i]) {
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
