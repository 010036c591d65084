// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
)

// TestShares: the probabilities of rules give endpoints connections in proportion to their weights.
func TestShares(t *testing.T) {
	weights := map[string]int{"10.244.1.5": 150, "10.244.2.5": 100, "10.244.2.6": 49, "10.244.2.7": 1, "10.244.2.8": 0}
	n := unstartedNode(t, newSimulated())
	n.Start(newSimulatedTier(n.options()), iptablestest.Facts, proxier.Policy{})
	n.OnServiceAdd(service(0))
	for address, weight := range weights {
		s := endpoints(0, address)
		s.Name += address
		s.Annotations = map[string]string{proxier.AnnotationWeight: fmt.Sprint(weight)}
		n.OnEndpointSliceAdd(s)
	}
	n.MustSync()
	// The rules of the chain are tried in turn.
	leads := regexp.MustCompile(`-m comment --comment "[^"]* -> ([0-9.]+):\d+"(.*--probability ([0-9.]+))?.* -j KUBE-SEP-`)
	rest, got := 1.0, map[string]float64{}
	for line := range strings.Lines(saved(t, n.Tools, proxier.IPv4)) {
		m := leads.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		probability := 1.0
		if m[3] != "" {
			var err error
			if probability, err = strconv.ParseFloat(m[3], 64); err != nil {
				t.Fatal(err)
			}
		}
		got[m[1]] += rest * probability
		rest *= 1 - probability
	}
	for address, weight := range weights {
		if want := float64(weight) / 300; math.Abs(got[address]-want) > 1e-6 {
			t.Errorf("%s gets %.6f of the connections, want %.6f", address, got[address], want)
		}
	}
}
