// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	clocktesting "k8s.io/utils/clock/testing"
)

// triggers keeps what the last sync told.
type triggers struct{ last [Families][]time.Time }

func (*triggers) Queued(time.Time) {}

func (r *triggers) Synced(info SyncInfo) { r.last = info.Triggers }

// TestTriggers: what the cluster saw before the process began does not count, and of several
// changes of a Service the oldest does, in the family of its slice.
func TestTriggers(t *testing.T) {
	began := time.Unix(1700000000, 0)
	told := &triggers{}
	p, err := New(Options{NodeName: "node1", Tier: &failingTier{}, Observer: told, Runner: RunnerOptions{Clock: clocktesting.NewFakeClock(began)}})
	if err != nil {
		t.Fatal(err)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	at := func(slice *discoveryv1.EndpointSlice, seconds int) {
		slice.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: began.Add(time.Duration(seconds) * time.Second).Format(time.RFC3339Nano)}
		p.OnEndpointSliceAdd(slice)
	}
	check := func(what string, want [Families][]time.Time) {
		t.Helper()
		if err := p.Sync(context.Background()); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, told.last, cmp.Comparer(time.Time.Equal)); d != "" {
			t.Errorf("%s (-want +got):\n%s", what, d)
		}
	}
	p.OnServiceAdd(makeService("a", clusterIPs("10.96.0.1", "fd00:10:96::1")))
	at(makeSlice("a-1", "10.244.0.1"), -1)
	check("before the beginning", [Families][]time.Time{})
	at(makeSlice("a-1", "10.244.0.2"), 8)
	at(makeSlice("a-1", "10.244.0.3"), 7)
	at(makeSlice("a-1", "10.244.0.4"), 9)
	check("one family", [Families][]time.Time{IPv4: {began.Add(7 * time.Second)}})
	at(makeSlice("a-1", "10.244.0.5"), 10)
	at(makeSlice("a-2", "fd00:10:244::1"), 11)
	check("both", [Families][]time.Time{{began.Add(10 * time.Second)}, {began.Add(11 * time.Second)}})
	check("nothing new", [Families][]time.Time{})
}
