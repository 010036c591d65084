// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/observe/events"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/backendstates"
)

// backendStates follows what operators say of backends on this node (tandemctl backend).
type backendStates struct {
	dir    string
	clock  clock.Clock
	known  []backendstates.Entry
	count  func([]proxier.BackendOverride)
	record func(reason, note string)
}

func (p *proxy) newBackendStates() *backendStates {
	return &backendStates{
		dir: p.opts.Config.Tandem.StateDirectory, clock: clock.RealClock{}, count: p.metrics.BackendStates,
		record: func(reason, note string) {
			if p.recorder != nil {
				p.recorder.Eventf(events.NodeReference(p.opts.nodeName), v1.EventTypeNormal, reason, "FollowBackendStates", "%s", note)
			}
		},
	}
}

// start returns what is known when the process starts.
func (b *backendStates) start(ctx context.Context) []proxier.BackendOverride {
	list, err := backendstates.Load(b.dir, b.clock.Now())
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read which backends are drained or quarantined; none is until this works")
	}
	b.known = list
	if len(list) > 0 {
		klog.FromContext(ctx).Info("Operators drained or quarantined backends on this node", "backends", len(list))
	}
	overrides := backendstates.Overrides(list)
	b.count(overrides)
	return overrides
}

// follow tells what changes until ctx is done.
func (b *backendStates) follow(ctx context.Context, tell func([]proxier.BackendOverride)) {
	logger := klog.FromContext(ctx)
	backendstates.Watch(ctx, b.dir, b.clock, b.known, func(list []backendstates.Entry) {
		overrides := backendstates.Overrides(list)
		tell(overrides)
		b.count(overrides)
		for _, e := range list {
			if !slices.ContainsFunc(b.known, func(was backendstates.Entry) bool {
				return was.Same(&e) && was.State == e.State && was.Until.Equal(e.Until)
			}) {
				b.report(logger, &e, e.State)
			}
		}
		for _, was := range b.known {
			if !slices.ContainsFunc(list, func(e backendstates.Entry) bool { return e.Same(&was) }) {
				b.report(logger, &was, proxier.ActiveState)
			}
		}
		b.known = list
	})
}

// report says that a backend is in another state now.
func (b *backendStates) report(logger klog.Logger, e *backendstates.Entry, state proxier.BackendState) {
	of, until, ends := "", "", "never"
	if e.Service != "" {
		of = " of Service " + e.Service
	}
	if !e.Until.IsZero() {
		ends = e.Until.UTC().Format(time.RFC3339)
		until = " until " + ends
	}
	switch state {
	case proxier.MaintenanceState:
		b.record("BackendDrained", fmt.Sprintf("backend %s%s gets no new connections from this node%s", e.Backend(), of, until))
	case proxier.QuarantinedState:
		b.record("BackendQuarantined", fmt.Sprintf("backend %s%s gets no new connections from this node%s while another one takes them", e.Backend(), of, until))
	default:
		b.record("BackendRestored", fmt.Sprintf("backend %s%s gets new connections of this node again", e.Backend(), of))
	}
	logger.Info("The state of a backend on this node changed, by 'tandemctl backend' or because its time ended", "backend", e.Backend(), "service", e.Service, "state", state.String(), "ends", ends)
}
