// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"context"
	"errors"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
)

// run is one run of a function under test.
type run struct {
	at     time.Duration
	reason RunReason
}

// startRunner returns a fake clock, the runs as they happen, and where the
// results of runs are taken from.
func startRunner(t *testing.T) (*Runner, *clocktesting.FakeClock, <-chan run, chan<- error) {
	t.Helper()
	began := time.Unix(1700000000, 0)
	clock := clocktesting.NewFakeClock(began)
	runs, results := make(chan run), make(chan error)
	r := NewRunner(func(ctx context.Context, reason RunReason) error {
		select {
		case runs <- run{clock.Since(began), reason}:
		case <-ctx.Done(): // no request follows a failure
			return ctx.Err()
		}
		select {
		case err := <-results:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}, RunnerOptions{MinInterval: time.Second, MaxInterval: time.Minute, RetryInterval: 5 * time.Second, Clock: clock})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { r.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	return r, clock, runs, results
}

func next(t *testing.T, runs <-chan run) run {
	t.Helper()
	select {
	case r := <-runs:
		return r
	case <-time.After(10 * time.Second):
		t.Fatal("no run")
		return run{}
	}
}

// waiting returns when the runner waits for its clock with that many timers.
func waiting(t *testing.T, clock *clocktesting.FakeClock) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !clock.HasWaiters() {
		if time.Now().After(deadline) {
			t.Fatal("the runner does not wait")
		}
		time.Sleep(100 * time.Microsecond)
	}
}

func TestRunner(t *testing.T) {
	r, clock, runs, results := startRunner(t)

	// The first request is served at once.
	r.Request()
	if got := next(t, runs); got != (run{0, Requested}) {
		t.Errorf("first: %+v", got)
	}
	// Requests during a run collapse into one, a minimum interval after it.
	for range 5 {
		r.Request()
	}
	results <- nil
	waiting(t, clock)
	clock.Step(time.Second)
	if got := next(t, runs); got != (run{time.Second, Requested}) {
		t.Errorf("second: %+v", got)
	}
	results <- nil

	// Without requests it runs after the maximum interval.
	waiting(t, clock)
	clock.Step(time.Minute)
	if got := next(t, runs); got != (run{61 * time.Second, Periodic}) {
		t.Errorf("periodic: %+v", got)
	}

	// Failures are retried, ever later.
	results <- errors.New("injected")
	waiting(t, clock)
	clock.Step(5 * time.Second)
	if got := next(t, runs); got != (run{66 * time.Second, Retried}) {
		t.Errorf("retry: %+v", got)
	}
	results <- errors.New("injected")
	waiting(t, clock)
	clock.Step(9 * time.Second)
	select {
	case got := <-runs:
		t.Errorf("retried too early: %+v", got)
	default:
	}
	clock.Step(time.Second)
	if got := next(t, runs); got != (run{76 * time.Second, Retried}) {
		t.Errorf("second retry: %+v", got)
	}
	results <- nil

	// After a quiet period a request is served at once again.
	waiting(t, clock)
	clock.Step(30 * time.Second)
	r.Request()
	if got := next(t, runs); got != (run{106 * time.Second, Requested}) {
		t.Errorf("after quiet: %+v", got)
	}
	results <- nil

	// A request during a periodic run is served right after it.
	waiting(t, clock)
	clock.Step(time.Minute)
	if got := next(t, runs); got != (run{166 * time.Second, Periodic}) {
		t.Errorf("periodic: %+v", got)
	}
	r.Request()
	results <- nil
	if got := next(t, runs); got != (run{166 * time.Second, Requested}) {
		t.Errorf("after that: %+v", got)
	}
	results <- nil
}

// After a quiet period a run needs no other goroutine; its failure is retried
// like any other.
func TestRunnerNow(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(1700000000, 0))
	var err error
	runs := make(chan RunReason, 10)
	r := NewRunner(func(_ context.Context, reason RunReason) error {
		runs <- reason
		return err
	}, RunnerOptions{MinInterval: time.Second, MaxInterval: time.Minute, RetryInterval: 5 * time.Second, Clock: clock})
	r.Now()
	if len(runs) != 0 {
		t.Error("ran before Run")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { r.Run(ctx); close(done) }()
	defer func() { cancel(); <-done }()
	if got := <-runs; got != Requested { // what Now requested above
		t.Errorf("%v", got)
	}
	waiting(t, clock)
	r.Now()
	if len(runs) != 0 {
		t.Error("ran before the minimum interval was over")
	}
	for len(runs) == 0 { // Run may be on its way to wait
		clock.Step(time.Second)
		time.Sleep(time.Millisecond)
	}
	<-runs
	clock.Step(2 * time.Second)
	err = errors.New("injected")
	r.Now()
	select {
	case <-runs:
	default:
		t.Fatal("did not run at once")
	}
	r.Now() // while it fails, Run decides when to try again
	if len(runs) != 0 {
		t.Error("tried again at once")
	}
}

// Intervals change while it waits, and for a try after a failure as well.
func TestRunnerIntervals(t *testing.T) {
	r, clock, runs, results := startRunner(t)
	waiting(t, clock)
	// The intervals before were longer than what is waited for here.
	r.SetIntervals(RunnerOptions{MinInterval: 2 * time.Second, MaxInterval: 20 * time.Second, RetryInterval: 10 * time.Minute})
	stepTo(t, clock, runs, Periodic, 30*time.Second)
	results <- errors.New("injected")
	waiting(t, clock)
	r.SetIntervals(RunnerOptions{MinInterval: 2 * time.Second, MaxInterval: 20 * time.Minute, RetryInterval: 4 * time.Second})
	stepTo(t, clock, runs, Retried, 10*time.Second)
	results <- nil
	waiting(t, clock)
	r.SetIntervals(RunnerOptions{MinInterval: time.Minute, MaxInterval: 20 * time.Minute, RetryInterval: 4 * time.Second})
	r.Request()
	if took := stepTo(t, clock, runs, Requested, 2*time.Minute); took < 50*time.Second {
		t.Errorf("a request waited %s, want a minute", took)
	}
	results <- nil
}

// stepTo moves the clock second by second up to a run, which has to come within the limit,
// for that reason.
func stepTo(t *testing.T, clock *clocktesting.FakeClock, runs <-chan run, reason RunReason, limit time.Duration) time.Duration {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for at := time.Duration(0); at <= limit; {
		select {
		case got := <-runs:
			if got.reason != reason {
				t.Errorf("%+v, want one that is %s", got, reason)
			}
			return at
		case <-time.After(100 * time.Microsecond):
		}
		if time.Now().After(deadline) {
			t.Fatal("the runner neither waits nor runs")
		}
		if clock.HasWaiters() { // else it is about to run, or to wait
			clock.Step(time.Second)
			at += time.Second
		}
	}
	t.Fatalf("no run within %s", limit)
	return 0
}

// recordingTier notes what it is given.
type recordingTier struct {
	updates []Update
	err     error
}

func (r *recordingTier) Sync(_ context.Context, u Update) error {
	r.updates = append(r.updates, u)
	return r.err
}

func (r *recordingTier) Cleanup(context.Context) error { return nil }

func (r *recordingTier) Supports(*Decision, *Frontend) error { return nil }

// Nothing is programmed before both lists are there; the API server's Service
// comes first; after a failure everything is given again.
func TestProxierGateAndOrder(t *testing.T) {
	tier := &recordingTier{}
	p, err := New(Options{NodeName: "node1", Tier: tier, Runner: DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	sync := func() { _ = p.Sync(t.Context()) }
	p.OnServiceAdd(makeService("a"))
	kubernetes := makeService("kubernetes", clusterIPs("10.96.0.2"))
	kubernetes.Namespace = "default"
	p.OnServiceAdd(makeService("b", clusterIPs("10.96.0.3")))
	p.OnServiceAdd(kubernetes)
	sync()
	p.OnServiceSynced()
	sync()
	if len(tier.updates) != 0 {
		t.Fatalf("programmed before the slices were listed: %+v", tier.updates)
	}
	p.OnEndpointSlicesSynced()
	sync()
	if len(tier.updates) != 1 || !tier.updates[0].Full || len(tier.updates[0].Changes) != 3 {
		t.Fatalf("%+v", tier.updates)
	}
	if first := tier.updates[0].Changes[0].New.Name.Name; first != "kubernetes" {
		t.Errorf("%s comes first", first)
	}

	tier.err = errors.New("injected")
	p.OnServiceDelete(makeService("a"))
	sync()
	if err := p.sync(t.Context(), Retried); err == nil {
		t.Error("a failure of the tier is no error")
	}
	last := tier.updates[len(tier.updates)-1]
	if !last.Full || len(last.Changes) != 2 {
		t.Errorf("after a failure: %+v", last)
	}
}

// Events before both lists are complete request no run: it would do nothing, and delay the
// first sync by the minimum interval.
func TestFirstSyncWaitsForNothing(t *testing.T) {
	p, err := New(Options{NodeName: "node1", Tier: &recordingTier{}, Runner: DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	for what, before := range map[string]func(){
		"facts":    func() { p.OnNodeAdd(nodeInZone("z1")) },
		"policy":   func() { p.UpdatePolicy(Policy{MasqueradeAll: true}, func(*Facts) {}) },
		"Services": p.OnServiceSynced,
	} {
		if before(); len(p.runner.request) != 0 {
			t.Errorf("%s asked for a run", what)
			<-p.runner.request
		}
	}
	if p.OnEndpointSlicesSynced(); len(p.runner.request) != 1 {
		t.Error("when all is there, no run is asked for")
	}
}

// A change of the node's zone changes which hints apply.
func TestZoneChange(t *testing.T) {
	tier := &recordingTier{}
	p, err := New(Options{NodeName: "node1", Tier: tier, Runner: DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	p.OnServiceAdd(makeService("a"))
	p.OnServiceAdd(makeService("b", clusterIPs("10.96.0.3")))
	p.OnEndpointSliceAdd(makeSlice("1", "10.244.0.1 zone=z1", "10.244.0.2 zone=z2"))
	_ = p.Sync(t.Context())
	p.OnNodeAdd(nodeInZone("z2"))
	_ = p.Sync(t.Context())
	last := tier.updates[len(tier.updates)-1]
	if len(last.Changes) != 1 || last.Changes[0].New.Size(V4Cluster) != 1 || last.Changes[0].New.Backends[0].Addr.String() != "10.244.0.2:8080" {
		t.Errorf("%+v", last)
	}
	p.OnNodeUpdate(nil, nodeInZone("z2"))
	_ = p.Sync(t.Context())
	if last := tier.updates[len(tier.updates)-1]; len(last.Changes) != 0 {
		t.Errorf("the same zone again: %+v", last)
	}
}

func nodeInZone(zone string) *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", Labels: map[string]string{v1.LabelTopologyZone: zone}}}
}
