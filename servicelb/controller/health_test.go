// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"net/http"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// TestHealth: a node is gone after so many misses, and there again at once. If none of several answers, all stay.
func TestHealth(t *testing.T) {
	h := newHealth(10256, func() {})
	up := map[string]bool{}
	h.client.Transport = roundTrip(func(r *http.Request) (*http.Response, error) {
		if !up[r.URL.Hostname()] {
			return nil, http.ErrServerClosed
		}
		return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
	})
	h.want([]*v1.Node{newNode("n1", "10.0.0.1"), newNode("n2", "10.0.0.2"), newNode("n3", "10.0.0.3")})
	for i, step := range []struct {
		up     []string
		rounds int
		want   []string
	}{
		{nil, 1, nil},
		{[]string{"10.0.0.1"}, 1, []string{"n1"}},
		{[]string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}, 1, []string{"n1", "n2", "n3"}},
		{[]string{"10.0.0.1", "10.0.0.3"}, missesUntilGone - 1, []string{"n1", "n2", "n3"}},
		{[]string{"10.0.0.1", "10.0.0.3"}, 1, []string{"n1", "n3"}},
		{nil, 5 * missesUntilGone, []string{"n1", "n3"}},
		{[]string{"10.0.0.2"}, missesUntilGone, []string{"n2"}},
		{nil, missesUntilGone, nil}, // the only one: nothing says that the network is at fault
		{[]string{"10.0.0.1"}, 1, []string{"n1"}},
	} {
		clear(up)
		for _, a := range step.up {
			up[a] = true
		}
		for range step.rounds {
			h.round(t.Context())
		}
		var got []string
		for _, n := range []string{"n1", "n2", "n3"} {
			if h.healthy(n) {
				got = append(got, n)
			}
		}
		if !slices.Equal(got, step.want) {
			t.Fatalf("step %d: healthy are %v, want %v", i, got, step.want)
		}
	}
}

// roundTrip is a transport.
type roundTrip func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper. Calls come one after the other.
func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
