// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// TestSizeOfChanges: among 2,000 Services, only what changed is written.
func TestSizeOfChanges(t *testing.T) {
	n := newNode(t, newSimulated())
	n.Serve(0, 2000, 1)
	n.MustSync()
	n.MustFullSync() // splits shared chains
	n.MustFullSync()
	n.Tools.Take()
	lines := func() (chains, inserts, rules int) {
		t.Helper()
		n.MustSync()
		wrote := n.Tools.Take()
		if len(wrote) != 1 {
			t.Fatalf("%d restores, want 1", len(wrote))
		}
		for line := range strings.Lines(wrote[0]) {
			switch line[0] {
			case ':':
				chains++
			case '-':
				rules++
				if strings.HasPrefix(line, "-I") {
					inserts++
				}
			}
		}
		return chains, inserts, rules
	}
	n.OnEndpointSliceUpdate(nil, endpoints(10, "10.244.9.9"))
	if chains, inserts, rules := lines(); chains != 3 || inserts != 0 || rules > 6 {
		t.Errorf("a changed endpoint: %d chains, %d inserted, %d lines", chains, inserts, rules)
	}
	n.OnServiceAdd(service(2001, balanced(2001), func(s *v1.Service) { s.Spec.Ports[0].NodePort = 31999 }))
	n.OnEndpointSliceAdd(endpoints(2001, "10.244.9.10"))
	// Rules for its ClusterIP, load balancer IP, echo replies of the latter, and NodePort.
	if chains, inserts, rules := lines(); chains != 3 || inserts != 4 || rules > 12 {
		t.Errorf("a new Service: %d chains, %d inserted, %d lines", chains, inserts, rules)
	}
	n.OnServiceDelete(service(2001))
	if chains, inserts, rules := lines(); chains > 7 || inserts != 0 || rules > 150 {
		t.Errorf("a deleted Service: %d chains, %d inserted, %d lines", chains, inserts, rules)
	}
}

// TestSizeOfDeletions: if thousands of Services are deleted at once, or lose all endpoints, restores
// are not larger than those that create Services. The time of a restore of the nft variant grows with
// the square of its size.
func TestSizeOfDeletions(t *testing.T) {
	const services, each = 1000, 10
	addrs := func(i int) (list []string) {
		for j := range each {
			list = append(list, pod((i*each+j)%10000))
		}
		return list
	}
	for name, change := range map[string]func(n *node, i int){
		"deleted":  func(n *node, i int) { n.OnServiceDelete(service(i)) },
		"unserved": func(n *node, i int) { n.OnEndpointSliceDelete(endpoints(i, addrs(i)...)) },
		"moved":    func(n *node, i int) { n.OnEndpointSliceUpdate(nil, endpoints(i, addrs(i+1)...)) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newSimulated())
			for i := range services {
				n.OnServiceAdd(service(i))
				n.OnEndpointSliceAdd(endpoints(i, addrs(i)...))
			}
			n.MustSync()
			n.Tools.Take()
			for i := range services {
				change(n, i)
			}
			n.MustSync()
			most := n.Tier.(*simulatedTier).families[proxier.IPv4].batchSize()
			all := 0
			for _, wrote := range n.Tools.Take() {
				chains := strings.Count(wrote, "\n:")
				all += chains
				if chains > most+addrSlots+2*(each+2) { // one more service port, and parts of a shared chain
					t.Errorf("%d chains in one restore, want at most %d", chains, most)
				}
			}
			if all < services*each {
				t.Errorf("only %d chains were written", all)
			}
		})
	}
}
