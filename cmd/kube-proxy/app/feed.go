// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// feed is a source that runs. It lists while the kernel is asked what it can do and the tiers
// are opened, and tells nothing before somebody takes it.
type feed struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when it has ended
	err    error         // then

	ctx   context.Context
	taken chan struct{} // closed when the next two are set
	to    proxier.Handler
	cidrs func(name string, cidrs []string)
}

// startFeed has a source run until ctx is done or it is stopped.
func startFeed(ctx context.Context, of func(proxier.Handler, func(string, []string)) source) *feed {
	f := &feed{done: make(chan struct{}), taken: make(chan struct{})}
	f.ctx, f.cancel = context.WithCancel(ctx)
	s := of(f, f.onServiceCIDR)
	go func() {
		defer close(f.done)
		f.err = s.Run(f.ctx)
	}()
	return f
}

// deliver has all that was listed, and comes, be told until ctx is done or the source ends.
func (f *feed) deliver(ctx context.Context, to proxier.Handler, cidrs func(string, []string)) error {
	f.to, f.cidrs = to, cidrs
	close(f.taken)
	defer context.AfterFunc(ctx, f.cancel)()
	<-f.done
	return f.err
}

// stop ends it.
func (f *feed) stop() {
	f.cancel()
	<-f.done
}

// tell waits until there is somebody to tell, or nobody ever will be.
func (f *feed) tell(what func(to proxier.Handler)) {
	select {
	case <-f.taken:
		what(f.to)
	case <-f.ctx.Done():
	}
}

func (f *feed) onServiceCIDR(name string, cidrs []string) {
	f.tell(func(proxier.Handler) { f.cidrs(name, cidrs) })
}

func (f *feed) OnServiceAdd(service *v1.Service) {
	f.tell(func(to proxier.Handler) { to.OnServiceAdd(service) })
}

func (f *feed) OnServiceUpdate(old, service *v1.Service) {
	f.tell(func(to proxier.Handler) { to.OnServiceUpdate(old, service) })
}

func (f *feed) OnServiceDelete(service *v1.Service) {
	f.tell(func(to proxier.Handler) { to.OnServiceDelete(service) })
}

func (f *feed) OnServiceSynced() {
	f.tell(func(to proxier.Handler) { to.OnServiceSynced() })
}

func (f *feed) OnEndpointSliceAdd(slice *discoveryv1.EndpointSlice) {
	f.tell(func(to proxier.Handler) { to.OnEndpointSliceAdd(slice) })
}

func (f *feed) OnEndpointSliceUpdate(old, slice *discoveryv1.EndpointSlice) {
	f.tell(func(to proxier.Handler) { to.OnEndpointSliceUpdate(old, slice) })
}

func (f *feed) OnEndpointSliceDelete(slice *discoveryv1.EndpointSlice) {
	f.tell(func(to proxier.Handler) { to.OnEndpointSliceDelete(slice) })
}

func (f *feed) OnEndpointSlicesSynced() {
	f.tell(func(to proxier.Handler) { to.OnEndpointSlicesSynced() })
}

func (f *feed) OnNodeAdd(node *v1.Node) {
	f.tell(func(to proxier.Handler) { to.OnNodeAdd(node) })
}

func (f *feed) OnNodeUpdate(old, node *v1.Node) {
	f.tell(func(to proxier.Handler) { to.OnNodeUpdate(old, node) })
}

func (f *feed) OnNodeDelete(node *v1.Node) {
	f.tell(func(to proxier.Handler) { to.OnNodeDelete(node) })
}

func (f *feed) OnNodeSynced() {
	f.tell(func(to proxier.Handler) { to.OnNodeSynced() })
}
