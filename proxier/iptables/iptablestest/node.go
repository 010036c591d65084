// SPDX-License-Identifier: Apache-2.0

package iptablestest

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// Node is a node whose rules a tier writes.
type Node struct {
	*proxier.Proxier
	Tools *Recorder
	Tier  proxier.Tier
	// Problems are those that were reported.
	Problems []proxier.Problem

	t *testing.T
}

// NewNode returns a node without a tier.
func NewNode(t *testing.T, tools Tools) *Node {
	return &Node{t: t, Tools: &Recorder{Tools: tools}}
}

// Reporter returns a reporter that adds to Problems.
func (n *Node) Reporter() proxier.Reporter {
	return proxier.ReporterFunc(func(p proxier.Problem) { n.Problems = append(n.Problems, p) })
}

// Start starts a process that knows no objects yet, and writes rules with this tier.
func (n *Node) Start(tier proxier.Tier, facts proxier.Facts, policy proxier.Policy) {
	n.t.Helper()
	n.Tier = tier
	var err error
	n.Proxier, err = proxier.New(proxier.Options{NodeName: "node1", Facts: facts, Policy: policy, Tier: tier})
	if err != nil {
		n.t.Fatal(err)
	}
	n.OnServiceSynced()
	n.OnEndpointSlicesSynced()
}

// MustSync writes pending changes. It fails the test on an error.
func (n *Node) MustSync() {
	n.t.Helper()
	if err := n.Sync(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
}

// FullSync is the periodic sync, which compares all rules.
func (n *Node) FullSync() error {
	return n.Tier.Sync(n.t.Context(), proxier.Update{Full: true, Changes: n.Table().All()})
}

// MustFullSync is FullSync, and fails the test on an error.
func (n *Node) MustFullSync() {
	n.t.Helper()
	if err := n.FullSync(); err != nil {
		n.t.Fatal(err)
	}
}

// Restore changes rules as another program on the node would.
func (n *Node) Restore(f proxier.Family, input string) {
	n.t.Helper()
	if err := n.Tools.Tools.Restore(n.t.Context(), f, []byte(input)); err != nil {
		n.t.Fatalf("%v\n%s", err, input)
	}
}

// Serve adds Services of many kinds, with the given number of IPv4 endpoints each.
func (n *Node) Serve(first, count, each int) {
	for i := first; i < first+count; i++ {
		n.OnServiceAdd(Service(i, KindOf(i)...))
		var addrs []string
		for j := range each {
			addrs = append(addrs, Pod(i*each+j))
		}
		if i%10 != 7 { // Services with 7 have no endpoints
			n.OnEndpointSliceAdd(Endpoints(i, addrs...))
			n.OnEndpointSliceAdd(Endpoints(i, fmt.Sprintf("fd00:10:244:1::%x", 1+i), fmt.Sprintf("fd00:10:244:2::%x", 1+i)))
		}
	}
}

// KindOf returns the changes for one of ten kinds of Services.
func KindOf(i int) []func(*v1.Service) {
	switch i % 10 {
	case 1:
		return []func(*v1.Service){Balanced(i)}
	case 2:
		return []func(*v1.Service){Balanced(i, "198.51.100.0/24", "10.244.0.0/16"), ExternalLocal}
	case 3:
		return []func(*v1.Service){DualStack(i), NodePort(int32(30000 + i))}
	case 4:
		return []func(*v1.Service){Sticky, DualStack(i)}
	case 5:
		return []func(*v1.Service){InternalLocal}
	}
	return nil
}
