// SPDX-License-Identifier: Apache-2.0

// Package controller writes what package servicelb decides into the status of Services, while it holds a Lease.
package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
}

const (
	// settle is how long changes are collected.
	settle = 20 * time.Millisecond
	// recheck is how often decisions are made without a change: a listener may have ended.
	recheck = 10 * time.Second
)

// condition of a Service says whether it has all addresses that it could have.
const condition = "servicelb.tandem-proxy.dev/Advertised"

// Controller writes the status of Services.
type Controller struct {
	client    kubernetes.Interface
	opts      Options
	recorder  record.EventRecorder
	services  corelisters.ServiceLister
	nodes     corelisters.NodeLister
	slices    discoverylisters.EndpointSliceLister
	factory   informers.SharedInformerFactory
	health    *health // nil if HealthPort is 0
	listeners *listeners
	wake      chan struct{}
	told      map[types.UID]string // what Events said last
}

// New makes a controller.
func New(client kubernetes.Interface, recorder record.EventRecorder, o Options) *Controller {
	c := &Controller{client: client, opts: o, recorder: recorder, wake: make(chan struct{}, 1), told: map[types.UID]string{}, listeners: newListeners()}
	c.factory = informers.NewSharedInformerFactory(client, 0)
	core, discovery := c.factory.Core().V1(), c.factory.Discovery().V1()
	c.services, c.nodes, c.slices = core.Services().Lister(), core.Nodes().Lister(), discovery.EndpointSlices().Lister()
	if o.HealthPort != 0 {
		c.health = newHealth(o.HealthPort, c.changed)
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
		c.askNodes()
		c.health.begin(ctx)
		done := make(chan struct{})
		defer func() { <-done }()
		go func() { defer close(done); c.health.run(ctx) }()
	}
	ticker := time.NewTicker(recheck)
	defer ticker.Stop()
	for {
		if err := c.sync(ctx); err != nil && ctx.Err() == nil {
			logger.Error(err, "Cannot write the status of some Services; trying again", "retryIn", time.Second)
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

func (c *Controller) askNodes() {
	nodes, _ := c.nodes.List(labels.Everything()) // a lister of a cache has no errors
	c.health.want(nodes)
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
		o.Healthy = c.health.healthy
	}
	o.Listens = c.listeners.listens
	return o
}

// sync decides about all Services, and writes what differs.
func (c *Controller) sync(ctx context.Context) error {
	o := c.objects()
	if c.health != nil {
		c.health.want(o.Nodes)
	}
	list := servicelb.Decide(o, c.opts.Options)
	if c.listeners.look(ctx) {
		list = servicelb.Decide(o, c.opts.Options)
	}
	var errs []error
	for _, s := range o.Services {
		if c.opts.Manages(s) && !s.DeletionTimestamp.IsZero() {
			errs = append(errs, c.finish(ctx, s))
		}
	}
	there := map[types.UID]bool{}
	for i := range list {
		there[list[i].Service.UID] = true
		errs = append(errs, c.write(ctx, &list[i]))
	}
	for uid := range c.told {
		if !there[uid] {
			delete(c.told, uid)
		}
	}
	return errors.Join(errs...)
}

// finish takes the finalizers of K3s' controller off a Service that is deleted: no other controller does once that is turned off.
func (c *Controller) finish(ctx context.Context, s *v1.Service) error {
	kept := slices.DeleteFunc(slices.Clone(s.Finalizers), func(f string) bool { return slices.Contains(servicelb.Finalizers, f) })
	if len(kept) == len(s.Finalizers) {
		return nil
	}
	after := s.DeepCopy()
	after.Finalizers = kept
	_, err := c.client.CoreV1().Services(s.Namespace).Update(ctx, after, metav1.UpdateOptions{})
	return ignoreRaces(err)
}

// write writes the status of a Service if it differs, and tells about it.
func (c *Controller) write(ctx context.Context, o *servicelb.Outcome) error {
	s := o.Service
	now := metav1.Condition{Type: condition, Status: metav1.ConditionTrue, Reason: "Advertised", ObservedGeneration: s.Generation, Message: sourceText(s)}
	if len(o.Reasons) > 0 {
		now.Status, now.Reason, now.Message = metav1.ConditionFalse, string(o.Reasons[0].Code), reasonsText(o.Reasons)
	}
	c.tell(o, now)
	known := meta.FindStatusCondition(s.Status.Conditions, condition)
	if known != nil && known.Status == now.Status && known.Reason == now.Reason && known.Message == now.Message && sameIngress(s.Status.LoadBalancer.Ingress, o.Ingress) {
		return nil
	}
	after := s.DeepCopy()
	after.Status.LoadBalancer.Ingress = o.Ingress
	meta.SetStatusCondition(&after.Status.Conditions, now)
	if _, err := c.client.CoreV1().Services(s.Namespace).UpdateStatus(ctx, after, metav1.UpdateOptions{}); err != nil {
		return ignoreRaces(err)
	}
	before, addresses := texts(s.Status.LoadBalancer.Ingress), texts(o.Ingress)
	if !slices.Equal(before, addresses) {
		klog.FromContext(ctx).Info("Changed the addresses of a Service", "service", klog.KObj(s), "before", before, "now", addresses)
		if len(addresses) > 0 {
			c.recorder.Eventf(s, v1.EventTypeNormal, "UpdatedLoadBalancer", "LoadBalancer addresses: %s", strings.Join(addresses, ", "))
		}
	}
	for _, i := range o.Ingress {
		for _, p := range s.Spec.Ports {
			c.listeners.forget(servicelb.Claim{Addr: netip.MustParseAddr(i.IP), Port: p.Port, Protocol: p.Protocol})
		}
	}
	return nil
}

// tell writes an Event about what a Service lacks, once.
func (c *Controller) tell(o *servicelb.Outcome, now metav1.Condition) {
	text := now.Reason
	if now.Status == metav1.ConditionFalse {
		text += now.Message
	}
	for _, w := range o.Warnings {
		text += w.Message
	}
	if c.told[o.Service.UID] == text {
		return
	}
	c.told[o.Service.UID] = text
	if now.Status == metav1.ConditionFalse {
		c.recorder.Event(o.Service, v1.EventTypeWarning, now.Reason, now.Message)
	}
	if len(o.Warnings) > 0 {
		c.recorder.Event(o.Service, v1.EventTypeWarning, string(o.Warnings[0].Code), reasonsText(o.Warnings))
	}
	if len(o.Ignored) > 0 {
		c.recorder.Eventf(o.Service, v1.EventTypeNormal, "IgnoredAnnotation", "there are no pods for these annotations to apply to: %s", strings.Join(o.Ignored, ", "))
	}
}

// ignoreRaces is for objects that changed or went meanwhile: their event is under way.
func ignoreRaces(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// maxReasons of a condition's message: the API server accepts 32 KiB, and more reasons would not fit.
const maxReasons = 8

func reasonsText(list []servicelb.Reason) string {
	var parts []string
	for i, r := range list {
		if i == maxReasons {
			parts = append(parts, fmt.Sprintf("and %d more", len(list)-i))
			break
		}
		parts = append(parts, r.Message)
	}
	return strings.Join(parts, "; ")
}

// sourceText says whether endpoints see the client's address.
func sourceText(s *v1.Service) string {
	if s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
		return "endpoints see the client's address"
	}
	return "endpoints on the node that a client dials see the client's address; others see that node's, unless the Service has direct server return"
}

// sameIngress compares all that a status may have: another controller may have written it.
func sameIngress(a, b []v1.LoadBalancerIngress) bool {
	return slices.EqualFunc(a, b, func(a, b v1.LoadBalancerIngress) bool {
		return a.IP == b.IP && a.Hostname == b.Hostname && len(a.Ports) == 0 && a.IPMode != nil && *a.IPMode == *b.IPMode
	})
}

func texts(list []v1.LoadBalancerIngress) (out []string) {
	for _, i := range list {
		out = append(out, i.IP)
	}
	return out
}
