// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// everything is a source with one call of each kind, from several goroutines, that then waits.
type everything struct {
	to   proxier.Handler
	cidr func(string, []string)
	err  error // it ends with, after that
}

func (s *everything) Run(ctx context.Context) error {
	var calls sync.WaitGroup
	calls.Go(func() {
		service := &v1.Service{}
		s.to.OnServiceAdd(service)
		s.to.OnServiceUpdate(service, service)
		s.to.OnServiceDelete(service)
		s.to.OnServiceSynced()
	})
	calls.Go(func() {
		slice := &discoveryv1.EndpointSlice{}
		s.to.OnEndpointSliceAdd(slice)
		s.to.OnEndpointSliceUpdate(slice, slice)
		s.to.OnEndpointSliceDelete(slice)
		s.to.OnEndpointSlicesSynced()
	})
	calls.Go(func() {
		node := &v1.Node{}
		s.to.OnNodeAdd(node)
		s.to.OnNodeUpdate(node, node)
		s.to.OnNodeDelete(node)
		s.to.OnNodeSynced()
	})
	calls.Go(func() { s.cidr("kubernetes", nil) })
	calls.Wait()
	if s.err == nil {
		<-ctx.Done()
	}
	return s.err
}

// heard are the names of calls.
type heard struct {
	mu   sync.Mutex
	list []string
}

func (h *heard) add(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.list = append(h.list, name)
}

func (h *heard) OnServiceAdd(*v1.Service)                              { h.add("service") }
func (h *heard) OnServiceUpdate(_, _ *v1.Service)                      { h.add("service other") }
func (h *heard) OnServiceDelete(*v1.Service)                           { h.add("service gone") }
func (h *heard) OnServiceSynced()                                      { h.add("services") }
func (h *heard) OnEndpointSliceAdd(*discoveryv1.EndpointSlice)         { h.add("slice") }
func (h *heard) OnEndpointSliceUpdate(_, _ *discoveryv1.EndpointSlice) { h.add("slice other") }
func (h *heard) OnEndpointSliceDelete(*discoveryv1.EndpointSlice)      { h.add("slice gone") }
func (h *heard) OnEndpointSlicesSynced()                               { h.add("slices") }
func (h *heard) OnNodeAdd(*v1.Node)                                    { h.add("node") }
func (h *heard) OnNodeUpdate(_, _ *v1.Node)                            { h.add("node other") }
func (h *heard) OnNodeDelete(*v1.Node)                                 { h.add("node gone") }
func (h *heard) OnNodeSynced()                                         { h.add("nodes") }
func (h *heard) onServiceCIDR(name string, _ []string)                 { h.add("cidr " + name) }

// A source has new Services and EndpointSlices recorded before a handler is attached, which gets everything else.
func TestSourceRunner(t *testing.T) {
	broken := errors.New("broken")
	for name, end := range map[string]error{"until its end": nil, "until the source fails": broken} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				recorded := &heard{}
				r := newSourceRunner(recorded, func(to proxier.Handler, cidr func(string, []string)) source { return &everything{to, cidr, end} })
				r.start(t.Context())
				h := &heard{}
				synctest.Wait()
				slices.Sort(recorded.list)
				if want := []string{"service", "slice"}; !slices.Equal(recorded.list, want) {
					t.Errorf("without a handler, it told %q", recorded.list)
				}
				ctx, cancel := context.WithCancel(t.Context())
				result := make(chan error, 1)
				go func() { result <- r.deliver(ctx, h, h.onServiceCIDR) }()
				synctest.Wait()
				slices.Sort(h.list)
				if want := []string{
					"cidr kubernetes", "node", "node gone", "node other", "nodes", "service gone", "service other", "services",
					"slice gone", "slice other", "slices",
				}; !slices.Equal(h.list, want) {
					t.Errorf("it told %q", h.list)
				}
				cancel()
				if err := <-result; err != end {
					t.Errorf("it ended with %v", err)
				}
				r.stop() // which may come later
			})
		})
	}
}

// slowRecorder records a Service while something else happens.
type slowRecorder struct {
	heard
	meanwhile func()
}

func (s *slowRecorder) OnServiceAdd(service *v1.Service) {
	s.meanwhile()
	s.heard.OnServiceAdd(service)
}

// No handler is attached while an object is being recorded: its first sync would miss that object.
func TestSourceRunnerRecordsWhole(t *testing.T) {
	recorded := &slowRecorder{}
	r := newSourceRunner(recorded, func(to proxier.Handler, cidr func(string, []string)) source { return &everything{to, cidr, nil} })
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	recorded.meanwhile = func() {
		go func() { result <- r.deliver(ctx, &heard{}, func(string, []string) {}) }()
		for range 10000 {
			runtime.Gosched()
		}
		select {
		case <-r.attached:
			t.Error("a handler is attached before the object is recorded")
		default:
		}
	}
	r.start(ctx)
	<-r.attached
	cancel()
	if err := <-result; err != nil {
		t.Error(err)
	}
}

// A source that is stopped before a handler is attached ends.
func TestSourceRunnerWithoutHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSourceRunner(&heard{}, func(to proxier.Handler, cidr func(string, []string)) source { return &everything{to, cidr, nil} })
		r.start(t.Context())
		synctest.Wait()
		r.stop()
	})
}
