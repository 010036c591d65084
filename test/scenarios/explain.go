// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// These methods serve other Clusters that play the same scenario beside a Model.

// Facts returns the current facts of a node.
func (m *Model) Facts(node string) proxier.Facts { return m.facts(m.node(node)) }

// NodeFacts returns proxier.Options.NodeFacts for a node.
func (m *Model) NodeFacts(node string) func(*v1.Node, *proxier.Facts) {
	n := m.node(node)
	return func(object *v1.Node, f *proxier.Facts) {
		n.object = object
		*f = m.facts(n)
	}
}

// Objects returns all current objects, sorted by kind and name.
func (m *Model) Objects() (list []metav1.Object) {
	for _, k := range slices.Sorted(maps.Keys(m.objects)) {
		list = append(list, m.objects[k])
	}
	return list
}

// Explain returns the explanation of each node that handles a call; none if the call
// passes.
func (m *Model) Explain(p Probe) ([]proxier.Explanation, error) {
	_, arrivals, err := m.call(p)
	list := make([]proxier.Explanation, len(arrivals))
	for i := range arrivals {
		list[i] = arrivals[i].Explanation
	}
	return list, err
}
