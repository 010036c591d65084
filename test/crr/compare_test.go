// SPDX-License-Identifier: Apache-2.0

//go:build linux

package crr

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/test/kernel"
)

func TestSummarise(t *testing.T) {
	// The third turn was disturbed, and half of the last one.
	got := summarise([]*runner{
		{entry: &entry{Variant: Direct{}}, costs: []float64{10, 12, 90, 8, 10}},
		{entry: &entry{Variant: &Proxy{Mode: "twice"}}, costs: []float64{20, 24, 100, 18, 30}},
	})
	want := []Result{
		{Variant: "direct", Cost: 10, Ratio: 1},
		{Variant: "twice", Cost: 24, Ratio: 2, Spread: 0.25},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
}

func TestQuantile(t *testing.T) {
	for _, tt := range []struct {
		q, want float64
	}{{0, 1}, {0.5, 2.5}, {0.25, 1.75}, {1, 4}} {
		if got := quantile([]float64{4, 2, 1, 3}, tt.q); got != tt.want {
			t.Errorf("quantile %v is %v, want %v", tt.q, got, tt.want)
		}
	}
}

// TestCompare measures what needs no other binary: that two clusters without
// a proxy cost the same, and that ours reaches its Services.
func TestCompare(t *testing.T) {
	kernel.NeedsPrograms(t)
	c := compare(t, 10, Direct{}, Direct{}, ebpf)
	for _, path := range []Path{NodePortLocal, NodePortRemote, ClusterIPLocal} {
		results, err := c.Path(path, 5)
		if err != nil {
			t.Fatal(err)
		}
		if len(results) != 3 {
			t.Fatalf("%s: %d results", path, len(results))
		}
		if r := results[1]; r.Cost < time.Microsecond || r.Ratio < 0.5 || r.Ratio > 2 {
			t.Errorf("%s: %v once and %v again", path, results[0].Cost, r.Cost)
		}
	}
}
