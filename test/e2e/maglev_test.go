// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// TestMaglevDisruption: explain and a metric tell what share of connections a change of endpoints moves.
func TestMaglevDisruption(t *testing.T) {
	s := newStage(t)
	service := strings.Replace(clusterIPs, "name: web}", fmt.Sprintf("name: web, annotations: {%s: maglev}}", proxier.AnnotationAlgorithm), 1)
	writeManifests(t, s.dir, service, s.here, s.there)
	s.start()
	defer s.end()
	s.serves(t)
	writeManifests(t, s.dir, service, s.there)
	s.await(t, "the change in explain", func() error {
		_, body, err := s.node.Get(t.Context(), 10249, "/debug/explain?src=127.0.0.1&dst=10.96.0.10:80")
		if err == nil && !strings.Contains(body, "of connections without state to other endpoints") {
			err = fmt.Errorf("explain says %s", body)
		}
		return err
	})
	// Two ports, two families; half of the slots were those of the endpoint that went.
	s.await(t, "four observations", func() error {
		metrics, err := s.node.Fetch(t.Context(), 10249, "/metrics")
		for _, want := range []string{"tandem_maglev_moved_ratio_count 4", `tandem_maglev_moved_ratio_bucket{le="0.25"} 0`, `tandem_maglev_moved_ratio_bucket{le="1"} 4`} {
			if err == nil && !strings.Contains(metrics, want) {
				err = fmt.Errorf("metrics lack %s", want)
			}
		}
		return err
	})
}
