// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"sync"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// sourceRunner runs a source before there is something to receive its objects. The source lists
// while the kernel is probed and the datapath is opened. New Services and EndpointSlices are
// recorded at once, in less memory than the objects take; a handler is called once one is attached.
type sourceRunner struct {
	source source
	record recordHandler
	cancel context.CancelFunc
	ended  chan struct{} // closed when the source has ended
	err    error         // why it ended

	stopping chan struct{} // closed when nothing will be attached any more
	attached chan struct{} // closed when the next two are set
	// mu has a new object recorded wholly before a handler is attached, whose first sync takes it.
	mu      sync.RWMutex
	handler proxier.Handler // nil before
	cidrs   func(name string, cidrs []string)
}

// recordHandler are the calls of a proxier.Handler that need no datapath.
type recordHandler interface {
	OnServiceAdd(service *v1.Service)
	OnEndpointSliceAdd(slice *discoveryv1.EndpointSlice)
}

// recorder records the objects in the tracker of a proxier that is still to be made.
type recorder struct {
	proxier.Handler // of nothing else
	tracker         *proxier.ChangeTracker
}

func (r *recorder) OnServiceAdd(service *v1.Service) { r.tracker.UpdateService(service) }

func (r *recorder) OnEndpointSliceAdd(slice *discoveryv1.EndpointSlice) {
	r.tracker.UpdateEndpointSlice(slice)
}

// newSourceRunner has a source made that calls it.
func newSourceRunner(record recordHandler, makeSource func(proxier.Handler, func(string, []string)) source) *sourceRunner {
	r := &sourceRunner{record: record, ended: make(chan struct{}), stopping: make(chan struct{}), attached: make(chan struct{})}
	r.source = makeSource(r, r.onServiceCIDR)
	return r
}

// start runs the source beside the caller until ctx is done or it is stopped.
func (r *sourceRunner) start(ctx context.Context) {
	ctx, r.cancel = context.WithCancel(ctx)
	context.AfterFunc(ctx, func() { close(r.stopping) })
	go func() {
		defer close(r.ended)
		r.err = r.source.Run(ctx)
	}()
}

// deliver calls a handler with all that was listed and all that follows, until ctx is done or
// the source ends.
func (r *sourceRunner) deliver(ctx context.Context, handler proxier.Handler, cidrs func(string, []string)) error {
	r.mu.Lock()
	r.handler, r.cidrs = handler, cidrs
	r.mu.Unlock()
	close(r.attached)
	defer context.AfterFunc(ctx, r.cancel)()
	<-r.ended
	return r.err
}

// stop ends the source.
func (r *sourceRunner) stop() {
	r.cancel()
	<-r.ended
}

// call waits for a handler, and drops the call if there will be none.
func (r *sourceRunner) call(do func(proxier.Handler)) {
	select {
	case <-r.attached:
		do(r.handler)
	case <-r.stopping:
	}
}

// add has the handler, or before there is one the recorder, take a new object.
func (r *sourceRunner) add(do func(recordHandler)) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.handler != nil {
		do(r.handler)
		return
	}
	do(r.record)
}

func (r *sourceRunner) onServiceCIDR(name string, cidrs []string) {
	r.call(func(proxier.Handler) { r.cidrs(name, cidrs) })
}

func (r *sourceRunner) OnServiceAdd(service *v1.Service) {
	r.add(func(h recordHandler) { h.OnServiceAdd(service) })
}

func (r *sourceRunner) OnServiceUpdate(old, service *v1.Service) {
	r.call(func(h proxier.Handler) { h.OnServiceUpdate(old, service) })
}

func (r *sourceRunner) OnServiceDelete(service *v1.Service) {
	r.call(func(h proxier.Handler) { h.OnServiceDelete(service) })
}

func (r *sourceRunner) OnServiceSynced() {
	r.call(func(h proxier.Handler) { h.OnServiceSynced() })
}

func (r *sourceRunner) OnEndpointSliceAdd(slice *discoveryv1.EndpointSlice) {
	r.add(func(h recordHandler) { h.OnEndpointSliceAdd(slice) })
}

func (r *sourceRunner) OnEndpointSliceUpdate(old, slice *discoveryv1.EndpointSlice) {
	r.call(func(h proxier.Handler) { h.OnEndpointSliceUpdate(old, slice) })
}

func (r *sourceRunner) OnEndpointSliceDelete(slice *discoveryv1.EndpointSlice) {
	r.call(func(h proxier.Handler) { h.OnEndpointSliceDelete(slice) })
}

func (r *sourceRunner) OnEndpointSlicesSynced() {
	r.call(func(h proxier.Handler) { h.OnEndpointSlicesSynced() })
}

func (r *sourceRunner) OnNodeAdd(node *v1.Node) {
	r.call(func(h proxier.Handler) { h.OnNodeAdd(node) })
}

func (r *sourceRunner) OnNodeUpdate(old, node *v1.Node) {
	r.call(func(h proxier.Handler) { h.OnNodeUpdate(old, node) })
}

func (r *sourceRunner) OnNodeDelete(node *v1.Node) {
	r.call(func(h proxier.Handler) { h.OnNodeDelete(node) })
}

func (r *sourceRunner) OnNodeSynced() {
	r.call(func(h proxier.Handler) { h.OnNodeSynced() })
}
