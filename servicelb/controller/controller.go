// SPDX-License-Identifier: Apache-2.0

// Package controller writes what package servicelb decides into the status of Services, while it holds a Lease.
package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/servicelb"
)

// Options of a controller.
type Options struct {
	servicelb.Options
	// HealthPort is where the kube-proxy of a node answers /healthz; 0 has nodes be advertised for as long as they are Ready.
	HealthPort uint16
	// DeleteKlipper has DaemonSets of klipper-lb be deleted once the nodes serve their Services.
	DeleteKlipper bool
}

const (
	// settle is how long changes are collected.
	settle = 20 * time.Millisecond
	// recheck is how often decisions are made without a change: a listener may have ended.
	recheck = 10 * time.Second
)

// Controller writes the status of Services.
type Controller struct {
	client    kubernetes.Interface
	opts      Options
	recorder  record.EventRecorder
	services  corelisters.ServiceLister
	nodes     corelisters.NodeLister
	slices    discoverylisters.EndpointSliceLister
	factory   informers.SharedInformerFactory
	health    *health  // nil if HealthPort is 0
	reports   *reports // likewise
	listeners *listeners
	overdue   *overdue
	planner   servicelb.Planner
	pods      cache.Indexer
	klipper   *klipper // nil if DaemonSets of klipper-lb stay
	wake      chan struct{}
	told      map[types.UID]told
	written   map[types.UID]*written
}

// New makes a controller.
func New(client kubernetes.Interface, recorder record.EventRecorder, o Options) *Controller {
	c := &Controller{client: client, opts: o, recorder: recorder, wake: make(chan struct{}, 1), told: map[types.UID]told{}, written: map[types.UID]*written{}, listeners: newListeners()}
	c.overdue = newOverdue(func(after time.Duration) { time.AfterFunc(after, c.changed) })
	if o.DeleteKlipper {
		c.klipper = newKlipper(client, recorder)
	}
	c.factory = informers.NewSharedInformerFactory(client, 0)
	core, discovery := c.factory.Core().V1(), c.factory.Discovery().V1()
	c.services, c.nodes, c.slices = core.Services().Lister(), core.Nodes().Lister(), discovery.EndpointSlices().Lister()
	if o.HealthPort != 0 {
		c.health, c.reports = newHealth(o.HealthPort, c.changed), newReports(o.HealthPort, c.changed)
	}
	for _, informer := range []cache.SharedIndexInformer{core.Services().Informer(), core.Nodes().Informer(), discovery.EndpointSlices().Informer()} {
		_ = informer.SetTransform(trim) // it has not started
		_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { c.changed() }, DeleteFunc: func(any) { c.changed() },
			UpdateFunc: func(before, after any) {
				if matters(before, after) {
					c.changed()
				}
			},
		})
	}
	c.watchPods()
	return c
}

// trim drops what takes memory and is not needed.
func trim(object any) (any, error) {
	if o, err := meta.Accessor(object); err == nil {
		o.SetManagedFields(nil)
	}
	if n, ok := object.(*v1.Node); ok {
		n.Status.Images, n.Status.VolumesAttached, n.Status.VolumesInUse, n.Annotations = nil, nil, nil, nil
	}
	return object, nil
}

// matters is false for the heartbeats of nodes.
func matters(before, after any) bool {
	old, ok := before.(*v1.Node)
	if !ok {
		return true
	}
	now := after.(*v1.Node)
	ready := func(n *v1.Node) (s v1.ConditionStatus) {
		for i := range n.Status.Conditions {
			if n.Status.Conditions[i].Type == v1.NodeReady {
				s = n.Status.Conditions[i].Status
			}
		}
		return s
	}
	return ready(old) != ready(now) || !reflect.DeepEqual(old.Labels, now.Labels) || !slices.Equal(old.Status.Addresses, now.Status.Addresses) ||
		old.DeletionTimestamp.IsZero() != now.DeletionTimestamp.IsZero()
}

func (c *Controller) changed() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Run watches and writes until ctx is done, and returns once nothing is under way any more.
func (c *Controller) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	c.factory.Start(ctx.Done())
	defer c.factory.Shutdown()
	for kind, ok := range c.factory.WaitForCacheSync(ctx.Done()) {
		if !ok {
			return errors.Join(ctx.Err(), fmt.Errorf("list %s", kind))
		}
	}
	logger.Info("Assigning addresses of nodes to Services", "class", servicelb.Class, "withoutClassToo", c.opts.DefaultClass)
	if c.health != nil {
		nodes := c.askNodes(ctx)
		c.health.begin(ctx)
		c.reports.begin(ctx, nodes, c.health.healthy)
		defer c.reports.wait()
		done := make(chan struct{})
		defer func() { <-done }()
		go func() { defer close(done); c.health.run(ctx) }()
	}
	ticker := time.NewTicker(recheck)
	defer ticker.Stop()
	for {
		if err := c.sync(ctx); err != nil && ctx.Err() == nil {
			logger.Error(err, "Cannot update all Services, or DaemonSets of klipper-lb; trying again", "retryIn", time.Second)
			time.AfterFunc(time.Second, c.changed)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		case <-c.wake:
			timer := time.NewTimer(settle)
			select {
			case <-ctx.Done():
			case <-timer.C:
			}
			timer.Stop()
		}
	}
}

func (c *Controller) askNodes(ctx context.Context) []*v1.Node {
	nodes, _ := c.nodes.List(labels.Everything()) // a lister of a cache has no errors
	c.health.want(nodes)
	c.reports.want(ctx, nodes)
	c.reports.forget(c.health.isGone)
	return nodes
}

// objects are those of the caches, in the order of their names.
func (c *Controller) objects() (o servicelb.Objects) {
	o.Services, _ = c.services.List(labels.Everything())
	o.Nodes, _ = c.nodes.List(labels.Everything())
	slices.SortFunc(o.Services, func(a, b *v1.Service) int {
		if d := strings.Compare(a.Namespace, b.Namespace); d != 0 {
			return d
		}
		return strings.Compare(a.Name, b.Name)
	})
	o.Slices = func(of types.NamespacedName) (list []*discoveryv1.EndpointSlice) {
		list, _ = c.slices.EndpointSlices(of.Namespace).List(labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: of.Name}))
		return list
	}
	if c.health != nil {
		o.Healthy = func(node string) bool { return c.health.healthy(node) && c.reports.known(node) }
		o.Report = c.reports.of
	}
	o.Overdue, o.HostPorts = c.overdue.is, c.hostPorts
	o.Listens = c.listeners.listens
	return o
}

// sync decides about all Services, and writes what differs.
func (c *Controller) sync(ctx context.Context) error {
	if c.health != nil {
		c.askNodes(ctx)
	}
	o := c.objects()
	c.overdue.begin()
	list := c.planner.Decide(o, c.opts.Options)
	if c.listeners.look(ctx) {
		if list = c.planner.Decide(o, c.opts.Options); c.listeners.want() {
			c.changed()
		}
	}
	c.overdue.end()
	var errs []error
	for _, s := range o.Services {
		switch {
		case !c.opts.Manages(s):
			errs = append(errs, c.withdraw(ctx, s))
		case !s.DeletionTimestamp.IsZero():
			errs = append(errs, c.finish(ctx, s))
		}
	}
	there := map[types.UID]bool{}
	for i := range list {
		there[list[i].Service.UID] = true
	}
	errs = append(errs, c.write(ctx, list))
	maps.DeleteFunc(c.told, func(uid types.UID, _ told) bool { return !there[uid] })
	maps.DeleteFunc(c.written, func(uid types.UID, _ *written) bool { return !there[uid] })
	if c.klipper != nil {
		errs = append(errs, c.klipper.sync(ctx, list))
	}
	return errors.Join(errs...)
}

func isOfK3s(finalizer string) bool { return slices.Contains(servicelb.Finalizers, finalizer) }

// finish takes the finalizers of K3s' controller off a Service that is deleted: no other controller does once that is turned off.
func (c *Controller) finish(ctx context.Context, s *v1.Service) error {
	kept := slices.DeleteFunc(slices.Clone(s.Finalizers), isOfK3s)
	if len(kept) == len(s.Finalizers) {
		return nil
	}
	after := s.DeepCopy()
	after.Finalizers = kept
	_, err := c.client.CoreV1().Services(s.Namespace).Update(ctx, after, metav1.UpdateOptions{})
	return ignoreRaces(err)
}
