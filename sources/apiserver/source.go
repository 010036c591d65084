// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
)

// The server filters, so that what is not for this proxy is never sent. A
// Service that starts to match arrives as added, one that stops as deleted.
const (
	serviceLabelSelector = "!" + LabelServiceProxyName
	serviceFieldSelector = "spec.clusterIP!=" + v1.ClusterIPNone
	sliceLabelSelector   = "!" + v1.IsHeadlessService
)

// Options of a Source.
type Options struct {
	// NodeName is the node whose Node object is watched. Empty means none.
	NodeName string
	// OnServiceCIDR is told of every ServiceCIDR with its ranges, and without
	// any once it is gone; nil for nobody.
	OnServiceCIDR func(name string, cidrs []string)
	// ServiceAnnotations are annotation keys to keep on Services; all others
	// are dropped before caching.
	ServiceAnnotations []string
	// Clock defaults to the real one.
	Clock clock.PassiveClock
}

// Source is the API server as a source of objects.
type Source struct {
	client  *Client
	handler proxier.Handler
	opts    Options
	trim    trimmer
	started atomic.Bool
	// absentInterval is shorter in tests.
	absentInterval time.Duration
}

// New builds a Source that feeds handler once it runs.
func New(client *Client, handler proxier.Handler, opts Options) *Source {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Source{
		client:  client,
		handler: handler,
		opts:    opts,
		trim:    trimmer{start: opts.Clock.Now(), serviceAnnotations: opts.ServiceAnnotations},

		absentInterval: absentInterval,
	}
}

// Run lists and watches until ctx ends. Losing the API server is not an error:
// Run goes on trying. A Source runs once.
//
// Calls for one kind of object come one after the other; calls for different
// kinds come in any order and at the same time.
func (s *Source) Run(ctx context.Context) error {
	if s.started.Swap(true) {
		return errors.New("run API server source: it has run already")
	}
	feeds := []feed{
		{
			resource: "services",
			object:   &v1.Service{},
			tweak: func(o *metav1.ListOptions) {
				o.LabelSelector, o.FieldSelector = serviceLabelSelector, serviceFieldSelector
			},
			list:  s.client.Services().List,
			watch: s.client.Services().Watch,
			handler: &kind[*v1.Service]{
				resource: "services",
				identity: func(m metav1.ObjectMeta, _ string) *v1.Service { return &v1.Service{ObjectMeta: m} },
				add:      s.handler.OnServiceAdd,
				update:   s.handler.OnServiceUpdate,
				delete:   s.handler.OnServiceDelete,
			},
			synced: s.handler.OnServiceSynced,
		},
		{
			resource: "endpointslices",
			object:   &discoveryv1.EndpointSlice{},
			tweak:    func(o *metav1.ListOptions) { o.LabelSelector = sliceLabelSelector },
			list:     s.client.EndpointSlices().List,
			watch:    s.client.EndpointSlices().Watch,
			handler: &kind[*discoveryv1.EndpointSlice]{
				resource: "endpointslices",
				identity: func(m metav1.ObjectMeta, service string) *discoveryv1.EndpointSlice {
					if service != "" {
						m.Labels = map[string]string{discoveryv1.LabelServiceName: service}
					}
					return &discoveryv1.EndpointSlice{ObjectMeta: m}
				},
				add:    s.handler.OnEndpointSliceAdd,
				update: s.updateSlice,
				delete: s.handler.OnEndpointSliceDelete,
			},
			synced: s.handler.OnEndpointSlicesSynced,
		},
	}
	if s.opts.NodeName != "" {
		feeds = append(feeds, feed{
			resource: "nodes",
			object:   &v1.Node{},
			tweak: func(o *metav1.ListOptions) {
				o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, s.opts.NodeName).String()
			},
			list:  s.client.Nodes().List,
			watch: s.client.Nodes().Watch,
			handler: &kind[*v1.Node]{
				resource: "nodes",
				identity: func(m metav1.ObjectMeta, _ string) *v1.Node { return &v1.Node{ObjectMeta: m} },
				add:      s.handler.OnNodeAdd,
				update:   s.handler.OnNodeUpdate,
				delete:   s.handler.OnNodeDelete,
			},
			synced: s.handler.OnNodeSynced,
		})
	}

	if on := s.opts.OnServiceCIDR; on != nil {
		feeds = append(feeds, feed{
			resource: "servicecidrs",
			optional: "connections to unallocated addresses of Services are not rejected", absentInterval: s.absentInterval,
			object: &networkingv1.ServiceCIDR{},
			tweak:  func(*metav1.ListOptions) {},
			list:   s.client.ServiceCIDRs().List,
			watch:  s.client.ServiceCIDRs().Watch,
			handler: &kind[*networkingv1.ServiceCIDR]{
				resource: "servicecidrs",
				identity: func(m metav1.ObjectMeta, _ string) *networkingv1.ServiceCIDR {
					return &networkingv1.ServiceCIDR{ObjectMeta: m}
				},
				add:    func(c *networkingv1.ServiceCIDR) { on(c.Name, c.Spec.CIDRs) },
				update: func(_, c *networkingv1.ServiceCIDR) { on(c.Name, c.Spec.CIDRs) },
				delete: func(c *networkingv1.ServiceCIDR) { on(c.Name, nil) },
			},
			synced: func() {},
		})
	}

	// An error that stops one feed from starting must stop the others too.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	for i := range feeds {
		if err := s.start(ctx, &feeds[i], &running); err != nil {
			cancel()
			return fmt.Errorf("watch %s: %w", feeds[i].resource, err)
		}
	}
	<-ctx.Done()
	return nil
}

// updateSlice splits the move of a slice to another Service: the receiver
// files slices by Service, and an update only names the new one.
func (s *Source) updateSlice(oldSlice, slice *discoveryv1.EndpointSlice) {
	if oldSlice.Labels[discoveryv1.LabelServiceName] != slice.Labels[discoveryv1.LabelServiceName] {
		s.handler.OnEndpointSliceDelete(oldSlice)
		s.handler.OnEndpointSliceAdd(slice)
		return
	}
	s.handler.OnEndpointSliceUpdate(oldSlice, slice)
}

// feed is one resource: where it comes from and where it goes.
type feed struct {
	resource string
	// optional resources may be unknown to the API server, or not for this
	// proxy; it says what is lost then.
	optional       string
	absentInterval time.Duration
	object         runtime.Object
	tweak          func(*metav1.ListOptions)
	list           cache.ListWithContextFunc
	watch          cache.WatchFuncWithContext
	handler        handler
	synced         func()
}

// handler is a kind of object.
type handler interface {
	cache.ResourceEventHandler
	wrap(obj any) any
}

func (s *Source) start(ctx context.Context, f *feed, running *sync.WaitGroup) error {
	conn := &connection{resource: f.resource, optional: f.optional, clock: s.opts.Clock}
	// Each resource has its own informer, not a factory's shared one: nobody
	// else reads these stores, and an index would only cost memory.
	informer := cache.NewSharedIndexInformerWithOptions(f.listWatch(s.client, conn), f.object,
		cache.SharedIndexInformerOptions{ObjectDescription: f.resource})
	if err := informer.SetTransform(func(obj any) (any, error) {
		obj, err := s.trim.transform(obj)
		if err != nil {
			return nil, err
		}
		return f.handler.wrap(obj), nil
	}); err != nil {
		return fmt.Errorf("set transform: %w", err)
	}
	if err := informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, _ *cache.Reflector, err error) {
		// A server ends watches regularly, and history expires while a
		// connection is down; both lead to a new watch and are no failure.
		if errors.Is(err, io.EOF) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			klog.FromContext(ctx).V(4).Info("Watch closed", "resource", f.resource, "err", err)
			return
		}
		conn.failed(ctx, err)
	}); err != nil {
		return fmt.Errorf("set watch error handler: %w", err)
	}
	registration, err := informer.AddEventHandler(f.handler)
	if err != nil {
		return fmt.Errorf("add event handler: %w", err)
	}

	running.Go(func() { informer.RunWithContext(ctx) })
	running.Go(func() {
		// The registration, not the informer: the informer has synced when its
		// store is full, the registration when the handler saw all of it.
		select {
		case <-registration.HasSyncedChecker().Done():
			klog.FromContext(ctx).V(2).Info("Received the first full list", "resource", f.resource)
			f.synced()
		case <-ctx.Done():
		}
	})
	return nil
}

// listWatch wraps the requests so that conn hears of each. client-go decides
// between a streamed list (WatchList, on by default since its 1.35) and a plain
// one, and falls back by itself where the server does not serve the stream.
func (f *feed) listWatch(client *Client, conn *connection) cache.ListerWatcher {
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			f.tweak(&o)
			list, err := f.list(ctx, o)
			if err != nil {
				conn.failed(ctx, err)
				if f.optional != "" && isAbsent(err) {
					// The informer would ask again within seconds.
					pause(ctx, f.absentInterval)
				}
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			f.tweak(&o)
			w, err := f.watch(ctx, o)
			switch {
			case err == nil:
				conn.succeeded(ctx)
			case o.SendInitialEvents != nil && apierrors.IsInvalid(err):
				klog.FromContext(ctx).V(2).Info("The API server does not stream lists, listing instead", "resource", f.resource)
			default:
				conn.failed(ctx, err)
			}
			if err != nil && o.SendInitialEvents != nil && utilnet.IsConnectionRefused(err) {
				// While nothing listens, the reflector's streamed list sleeps up
				// to 30 s without heeding ctx, and so would Run. Hidden from it,
				// the refusal leads to a plain list, whose pause ends with ctx.
				err = fmt.Errorf("open streamed list: %v", err)
			}
			return w, err
		},
	}, client)
}

// pause waits, but not beyond ctx.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
