// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// What a Model knows beforehand is of use to clusters that are fed alike.

// Facts of a node at this moment.
func (m *Model) Facts(node string) proxier.Facts { return m.facts(m.node(node)) }

// NodeFacts is proxier.Options.NodeFacts of a node.
func (m *Model) NodeFacts(node string) func(*v1.Node, *proxier.Facts) {
	n := m.node(node)
	return func(object *v1.Node, f *proxier.Facts) {
		n.object = object
		*f = m.facts(n)
	}
}

// Objects that are there at this moment, in the order of kinds and names.
func (m *Model) Objects() (list []metav1.Object) {
	for _, k := range slices.Sorted(maps.Keys(m.objects)) {
		list = append(list, m.objects[k])
	}
	return list
}

// Explain says what each node that has to do with a call makes of it: none
// where the call passes.
func (m *Model) Explain(p Probe) ([]proxier.Explanation, error) {
	_, arrivals, err := m.call(p)
	list := make([]proxier.Explanation, len(arrivals))
	for i := range arrivals {
		list[i] = arrivals[i].Explanation
	}
	return list, err
}
