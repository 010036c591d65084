// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	clocktesting "k8s.io/utils/clock/testing"
)

// slowTier takes three seconds for a sync.
type slowTier struct {
	failingTier
	clock *clocktesting.FakeClock
}

func (s *slowTier) Sync(ctx context.Context, u Update) error {
	s.clock.Step(3 * time.Second)
	return s.failingTier.Sync(ctx, u)
}

// TestFirstSyncLogged: the first sync that succeeds is logged, once, with what it wrote and how long it took.
func TestFirstSyncLogged(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	clock := clocktesting.NewFakeClock(time.Unix(1700000000, 0))
	tier := &slowTier{failingTier{err: errors.New("failed")}, clock}
	p, err := New(Options{NodeName: "node1", Tier: tier, Runner: RunnerOptions{Clock: clock}})
	if err != nil {
		t.Fatal(err)
	}
	of := func(service string, s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
		s.Labels[discoveryv1.LabelServiceName] = service
		return s
	}
	p.OnServiceAdd(makeService("a", ports(v1.ServicePort{Name: "p", Port: 80, Protocol: v1.ProtocolTCP}, v1.ServicePort{Name: "q", Port: 81, Protocol: v1.ProtocolTCP})))
	p.OnServiceAdd(makeService("b", clusterIPs("10.96.0.2")))
	p.OnServiceAdd(makeService("empty", clusterIPs("10.96.0.3")))
	p.OnEndpointSliceAdd(of("a", makeSlice("a-1", "10.244.0.1", "10.244.0.2")))
	p.OnEndpointSliceAdd(of("b", makeSlice("b-1", "10.244.0.1", "10.244.0.3", "10.244.0.4")))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	sync := func(what string, want ...string) {
		t.Helper()
		_ = p.Sync(klog.NewContext(context.Background(), logger))
		if got := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); strings.Count(got, "\n") != len(want) || !strings.Contains(got, strings.Join(want, "")) {
			t.Errorf("%s, the log has\n%swant %q", what, got, want)
		}
	}
	sync("after a failure")
	tier.err = nil
	const line = `Programmed all Services servicePorts=4 endpoints=5 duration="3s"` + "\n"
	sync("after the first", line)
	p.OnServiceAdd(makeService("c", clusterIPs("10.96.0.4")))
	sync("after the second", line)
}
