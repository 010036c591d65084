// SPDX-License-Identifier: Apache-2.0

package proxier

import "strings"

// Clients is a set of origins.
type Clients [Origins]bool

// String is "pod,host"; "none" for the empty set.
func (c Clients) String() string {
	var names []string
	for o := range Origins {
		if c[o] {
			names = append(names, o.String())
		}
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ",")
}

// Share is the part of all Services that this proxy serves on a node where another one serves the
// rest: these kinds of frontends, for these clients. A client outside the node is one whose
// packets come in by an uplink, even if it is a pod of another node.
type Share struct {
	Kinds   [kinds]bool
	Clients Clients
}

// Has reports whether frontends of a kind are part of it, for any clients.
func (s *Share) Has(k Kind) bool { return k < kinds && s.Kinds[k] }

// Kinds are all kinds of frontends, in the order of precedence.
func Kinds() []Kind {
	list := make([]Kind, 0, kinds)
	for k := ClusterIP; k < kinds; k++ {
		list = append(list, k)
	}
	return list
}
