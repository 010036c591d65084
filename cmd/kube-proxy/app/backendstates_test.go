// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/backendstates"
)

// TestBackendStates: what operators say at the start and later reaches the decisions, and each change is an Event.
func TestBackendStates(t *testing.T) {
	dir := t.TempDir()
	entry := func(address, service string, state proxier.BackendState) backendstates.Entry {
		return backendstates.Entry{Address: netip.MustParseAddr(address), Service: service, State: state, Since: time.Now()}
	}
	set := func(e backendstates.Entry) {
		t.Helper()
		if err := backendstates.Set(dir, e, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	set(entry("10.0.0.1", "", proxier.MaintenanceState))
	events, told := make(chan string, 10), make(chan []proxier.BackendOverride)
	counted := 0
	b := &backendStates{
		dir: dir, clock: clock.RealClock{}, count: func(list []proxier.BackendOverride) { counted = len(list) },
		record: func(reason, note string) { events <- reason + ": " + note },
	}
	if list := b.start(t.Context()); len(list) != 1 || counted != 1 {
		t.Fatalf("at the start: %v, %d counted", list, counted)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.follow(ctx, func(list []proxier.BackendOverride) {
			select {
			case told <- list:
			case <-ctx.Done():
			}
		})
	}()
	defer func() { cancel(); <-done }()
	next := func(overrides int, want string) {
		t.Helper()
		select {
		case list := <-told:
			if len(list) != overrides {
				t.Errorf("overrides %v, want %d", list, overrides)
			}
		case <-time.After(30 * time.Second):
			t.Fatal("nothing was told")
		}
		if got := <-events; got != want {
			t.Errorf("Event %q, want %q", got, want)
		}
	}
	set(entry("10.0.0.2", "ns/a", proxier.QuarantinedState))
	next(2, "BackendQuarantined: backend 10.0.0.2 of Service ns/a gets no new connections from this node while another one takes them")
	until := entry("10.0.0.2", "ns/a", proxier.MaintenanceState)
	until.Until = time.Now().Add(time.Hour)
	set(until)
	next(2, "BackendDrained: backend 10.0.0.2 of Service ns/a gets no new connections from this node until "+until.Until.UTC().Format(time.RFC3339))
	if _, err := backendstates.Remove(dir, entry("10.0.0.1", "", proxier.ActiveState), time.Now()); err != nil {
		t.Fatal(err)
	}
	next(1, "BackendRestored: backend 10.0.0.1 gets new connections of this node again")
}
