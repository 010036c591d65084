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

// The server filters by these selectors. A Service that starts to match arrives as added, one
// that stops as deleted.
const (
	serviceLabelSelector = "!" + LabelServiceProxyName
	serviceFieldSelector = "spec.clusterIP!=" + v1.ClusterIPNone
	sliceLabelSelector   = "!" + v1.IsHeadlessService
)

// Options of a Source.
type Options struct {
	// NodeName is the node whose Node object is watched. Empty means none.
	NodeName string
	// OnServiceCIDR is called with every ServiceCIDR and its ranges, and without ranges
	// when it is deleted. If nil, ServiceCIDRs are not watched.
	OnServiceCIDR func(name string, cidrs []string)
	// ServiceAnnotations are the annotation keys to keep on Services; one that ends in a slash stands
	// for all that begin with it. Others are dropped. SliceAnnotations are those of EndpointSlices.
	ServiceAnnotations, SliceAnnotations []string
	// Clock defaults to the real one.
	Clock clock.PassiveClock
}

// Source reads objects from the API server.
type Source struct {
	client        *Client
	opts          Options
	subscriptions func(klog.Logger) []subscription
	trim          trimmer
	started       atomic.Bool
	// absentInterval is shorter in tests.
	absentInterval time.Duration
}

// New builds a Source that calls handler while it runs.
func New(client *Client, handler proxier.Handler, opts Options) *Source {
	s := newSource(client, opts)
	s.subscriptions = func(logger klog.Logger) []subscription { return s.services(logger, handler) }
	return s
}

func newSource(client *Client, opts Options) *Source {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Source{
		client: client,
		opts:   opts,
		trim:   trimmer{start: opts.Clock.Now(), serviceAnnotations: opts.ServiceAnnotations, sliceAnnotations: opts.SliceAnnotations},

		absentInterval: absentInterval,
	}
}

// Run lists and watches until ctx ends. If the API server is unavailable, Run retries. A Source
// runs once.
//
// Calls for one kind of object are sequential. Calls for different kinds are concurrent.
func (s *Source) Run(ctx context.Context) error {
	if s.started.Swap(true) {
		return errors.New("run API server source: it has run already")
	}
	subscriptions := s.subscriptions(klog.FromContext(ctx))

	// If one subscription cannot start, the others must stop.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	for i := range subscriptions {
		if err := s.start(ctx, &subscriptions[i], &running); err != nil {
			cancel()
			return fmt.Errorf("watch %s: %w", subscriptions[i].resource, err)
		}
	}
	<-ctx.Done()
	return nil
}

// services are the subscriptions to what a handler is told of.
func (s *Source) services(logger klog.Logger, handler proxier.Handler) []subscription {
	if s.client.inCluster {
		// That address is a Service, which this process has to program first.
		logger.Info("Neither a kubeconfig nor a master URL is set, connecting to the API server's Service address, which may not work on a new node")
	}
	subscriptions := []subscription{
		{
			resource: "services",
			object:   &v1.Service{},
			tweak: func(o *metav1.ListOptions) {
				o.LabelSelector, o.FieldSelector = serviceLabelSelector, serviceFieldSelector
			},
			list:  s.client.Services().List,
			watch: s.client.Services().Watch,
			handler: &kind[*v1.Service]{
				logger: logger, resource: "services",
				identity: func(m metav1.ObjectMeta, _ string) *v1.Service { return &v1.Service{ObjectMeta: m} },
				add:      handler.OnServiceAdd,
				update:   handler.OnServiceUpdate,
				delete:   handler.OnServiceDelete,
			},
			synced: handler.OnServiceSynced,
		},
		{
			resource: "endpointslices",
			object:   &discoveryv1.EndpointSlice{},
			tweak:    func(o *metav1.ListOptions) { o.LabelSelector = sliceLabelSelector },
			list:     s.client.EndpointSlices().List,
			watch:    s.client.EndpointSlices().Watch,
			handler: &kind[*discoveryv1.EndpointSlice]{
				logger: logger, resource: "endpointslices",
				identity: func(m metav1.ObjectMeta, service string) *discoveryv1.EndpointSlice {
					if service != "" {
						m.Labels = map[string]string{discoveryv1.LabelServiceName: service}
					}
					return &discoveryv1.EndpointSlice{ObjectMeta: m}
				},
				add:    handler.OnEndpointSliceAdd,
				update: func(old, slice *discoveryv1.EndpointSlice) { updateSlice(handler, old, slice) },
				delete: handler.OnEndpointSliceDelete,
			},
			synced: handler.OnEndpointSlicesSynced,
		},
	}
	if s.opts.NodeName != "" {
		subscriptions = append(subscriptions, subscription{
			resource: "nodes",
			object:   &v1.Node{},
			tweak: func(o *metav1.ListOptions) {
				o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, s.opts.NodeName).String()
			},
			list:  s.client.Nodes().List,
			watch: s.client.Nodes().Watch,
			handler: &kind[*v1.Node]{
				logger: logger, resource: "nodes",
				identity: func(m metav1.ObjectMeta, _ string) *v1.Node { return &v1.Node{ObjectMeta: m} },
				add:      handler.OnNodeAdd,
				update:   handler.OnNodeUpdate,
				delete:   handler.OnNodeDelete,
			},
			synced: handler.OnNodeSynced,
		})
	}

	if on := s.opts.OnServiceCIDR; on != nil {
		subscriptions = append(subscriptions, subscription{
			resource: "servicecidrs",
			optional: "connections to unallocated ClusterIPs are not rejected", absentInterval: s.absentInterval,
			object: &networkingv1.ServiceCIDR{},
			tweak:  func(*metav1.ListOptions) {},
			list:   s.client.ServiceCIDRs().List,
			watch:  s.client.ServiceCIDRs().Watch,
			handler: &kind[*networkingv1.ServiceCIDR]{
				logger: logger, resource: "servicecidrs",
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
	return subscriptions
}

// updateSlice turns the move of a slice to another Service into a delete and an add: the handler
// stores slices by Service, and an update has only the new one.
func updateSlice(handler proxier.Handler, oldSlice, slice *discoveryv1.EndpointSlice) {
	if oldSlice.Labels[discoveryv1.LabelServiceName] != slice.Labels[discoveryv1.LabelServiceName] {
		handler.OnEndpointSliceDelete(oldSlice)
		handler.OnEndpointSliceAdd(slice)
		return
	}
	handler.OnEndpointSliceUpdate(oldSlice, slice)
}

// subscription connects the requests for one resource with the handler.
type subscription struct {
	resource string
	// optional is set if the API server may lack the resource or deny access to it. It
	// describes the consequence.
	optional       string
	absentInterval time.Duration
	after          <-chan struct{} // if set, it starts when this is closed
	review         bool            // ask whether access is allowed first; for optional ones
	denied         func(error)     // called after each review that says no; optional
	object         runtime.Object
	tweak          func(*metav1.ListOptions)
	list           cache.ListWithContextFunc
	watch          cache.WatchFuncWithContext
	handler        handler
	synced         func()
}

// handler is a kind of any type.
type handler interface {
	cache.ResourceEventHandler
	wrap(obj any) any
}

func (s *Source) start(ctx context.Context, f *subscription, running *sync.WaitGroup) error {
	conn := &connection{resource: f.resource, optional: f.optional, clock: s.opts.Clock}
	// The informers are not shared through a factory: these stores have no other
	// readers, and an index would only take memory.
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
		// Servers end watches regularly, and history expires while a connection is
		// down. Both lead to a new watch and are no failure.
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

	running.Go(func() {
		if f.after != nil {
			select {
			case <-f.after:
			case <-ctx.Done():
				return
			}
		}
		if f.review {
			f.awaitAccess(ctx, s.client, conn)
		}
		informer.RunWithContext(ctx)
	})
	running.Go(func() {
		// Wait for the registration, not the informer: the informer has synced when
		// its store is complete, the registration when the handler has received all
		// of it.
		select {
		case <-registration.HasSyncedChecker().Done():
			klog.FromContext(ctx).V(2).Info("Received the initial list", "resource", f.resource)
			f.synced()
		case <-ctx.Done():
		}
	})
	return nil
}

// reviewInterval is the time before access is asked for again after a failure.
const reviewInterval = 5 * time.Second

// awaitAccess returns when the resource may be watched, or ctx is done.
func (f *subscription) awaitAccess(ctx context.Context, client *Client, conn *connection) {
	var o metav1.ListOptions
	f.tweak(&o)
	for ctx.Err() == nil {
		err := client.mayWatch(ctx, f.resource, o.FieldSelector)
		if err == nil {
			return
		}
		conn.failed(ctx, err)
		if isAbsent(err) {
			if f.denied != nil {
				f.denied(err)
			}
			pause(ctx, f.absentInterval)
		} else {
			pause(ctx, reviewInterval)
		}
	}
}

// listWatch reports the result of each request to conn. client-go chooses between a streamed
// list (WatchList, by default since 1.35) and a plain one, and falls back to the latter if the
// server does not support streams.
func (f *subscription) listWatch(client *Client, conn *connection) cache.ListerWatcher {
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			f.tweak(&o)
			list, err := f.list(ctx, o)
			if err != nil {
				conn.failed(ctx, err)
				if f.optional != "" && isAbsent(err) {
					// The informer would retry within seconds.
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
				klog.FromContext(ctx).V(2).Info("API server does not support streamed lists, using plain lists", "resource", f.resource)
			default:
				conn.failed(ctx, err)
			}
			if err != nil && o.SendInitialEvents != nil && utilnet.IsConnectionRefused(err) {
				// For a refused connection, the reflector's streamed list sleeps up
				// to 30 s even if ctx ends, which would block Run. Without the
				// wrapped error it makes a plain list, whose pause ends with ctx.
				err = fmt.Errorf("open streamed list: %v", err)
			}
			return w, err
		},
	}, client)
}

// pause waits for a time or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
