// SPDX-License-Identifier: Apache-2.0

package proxier

import "strings"

// Set names one of the backend sets of a service port: by the family of the
// backends, and by whether those on this node alone are in it. SetOf makes one,
// Family and Local take it apart; nothing else depends on the numbers but the
// eBPF maps, which hold them.
type Set uint8

// The sets of a service port, fit to index an array of length Sets. Frontends
// with the same eligible backends share one.
const (
	V4Cluster Set = iota
	V4Local
	V6Cluster
	V6Local
	Sets
)

// SetOf returns the set of a family for traffic policy Cluster, or with local for policy
// Local.
func SetOf(f Family, local bool) Set {
	s := Set(f) * 2
	if local {
		s++
	}
	return s
}

// Family of the backends in the set.
func (s Set) Family() Family { return Family(s / 2) }

// Local reports whether the set has backends on this node alone.
func (s Set) Local() bool { return s&1 != 0 }

// Member is the set's bit in Backend.Members.
func (s Set) Member() Members {
	if s.Local() {
		return InLocal
	}
	return InCluster
}

func (s Set) String() string {
	kind := "cluster"
	if s.Local() {
		kind = "local"
	}
	return strings.ToLower(s.Family().String()) + "/" + kind
}

// Members says in which sets of its family a backend is.
type Members uint8

// The sets a backend can be in. A backend in no set is kept only for its current
// clients.
const (
	InCluster Members = 1 << iota
	InLocal
)
