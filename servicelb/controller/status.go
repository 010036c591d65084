// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/servicelb"
	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

const (
	// maxProbing is how many addresses of a Service are probed at once: a message of the API server has up to 32 KiB.
	maxProbing = 700
	// maxReasons of a condition's message, likewise.
	maxReasons = 8
	// firstPause is the delay before a status that another controller has overwritten is written again. It doubles up to maxPause.
	firstPause, maxPause = time.Second, 5 * time.Minute
)

// written is what was written of a Service last.
type written struct {
	// base and version are the resource versions before and after.
	base, version string
	ingress       []v1.LoadBalancerIngress
	// overwritten counts how often another controller replaced the addresses. seen is the last such resource version, and until is when
	// the status may be written again.
	overwritten int
	seen        string
	until       time.Time
}

// update is a status to be written.
type update struct {
	outcome *servicelb.Outcome
	after   *v1.Service
	done    bool
}

// writesAtOnce bounds how many statuses are written at the same time.
const writesAtOnce = 16

// write writes the statuses that differ, and tells about them. A Service that loses an address is written before one that gains it: unless
// two swap addresses, none is in two statuses, whatever fails.
func (c *Controller) write(ctx context.Context, list []servicelb.Outcome) error {
	var losers, others []*update
	for i := range list {
		switch u := c.prepare(ctx, &list[i]); {
		case u == nil:
		case u.loses():
			losers = append(losers, u)
		default:
			others = append(others, u)
		}
	}
	err := c.apply(ctx, losers)
	held := map[string]bool{}
	for _, u := range losers {
		if !u.done {
			for _, i := range u.outcome.Service.Status.LoadBalancer.Ingress {
				held[i.IP] = true
			}
		}
	}
	if len(held) > 0 {
		others = slices.DeleteFunc(others, func(u *update) bool {
			return slices.ContainsFunc(u.outcome.Ingress, func(i v1.LoadBalancerIngress) bool { return held[i.IP] })
		})
	}
	return errors.Join(err, c.apply(ctx, others))
}

// loses reports whether a Service has an address that it is not to have any more.
func (u *update) loses() bool {
	now := texts(u.outcome.Ingress)
	return slices.ContainsFunc(u.outcome.Service.Status.LoadBalancer.Ingress, func(i v1.LoadBalancerIngress) bool { return !slices.Contains(now, i.IP) })
}

// prepare returns what is to be written of a Service; nil if nothing is.
func (c *Controller) prepare(ctx context.Context, o *servicelb.Outcome) *update {
	s := o.Service
	was := c.written[s.UID]
	if was != nil && was.base == s.ResourceVersion && was.version != was.base {
		return nil // the cache has not seen yet what was written
	}
	if was != nil && c.leaveAlone(ctx, s, was) {
		return nil
	}
	advertised := metav1.Condition{Type: nodereport.ConditionAdvertised, Status: metav1.ConditionTrue, Reason: "Advertised", ObservedGeneration: s.Generation, Message: sourceText(o)}
	if len(o.Reasons) > 0 {
		advertised.Status, advertised.Reason, advertised.Message = metav1.ConditionFalse, string(o.Reasons[0].Code), reasonsText(o.Reasons)
		if len(o.Ingress) > 0 {
			advertised.Message += ". Of the addresses that it has, " + sourceText(o)
		}
	}
	c.tell(o)
	probing := probingText(slices.Concat(o.Probing, o.LeftOut))
	if sameCondition(s, &advertised) && probing == probingOf(s) && sameIngress(s.Status.LoadBalancer.Ingress, o.Ingress) {
		return nil
	}
	after := s.DeepCopy()
	after.Status.LoadBalancer.Ingress = o.Ingress
	meta.SetStatusCondition(&after.Status.Conditions, advertised)
	if probing == "" {
		meta.RemoveStatusCondition(&after.Status.Conditions, nodereport.ConditionProbing)
	} else {
		meta.SetStatusCondition(&after.Status.Conditions, metav1.Condition{Type: nodereport.ConditionProbing, Status: metav1.ConditionTrue, Reason: "Probing", Message: probing})
	}
	return &update{outcome: o, after: after}
}

// apply writes some statuses at once. What changed or went meanwhile is not done, and no error: its event is under way.
func (c *Controller) apply(ctx context.Context, list []*update) error {
	results := make([]*v1.Service, len(list))
	errs := make([]error, len(list))
	var group errgroup.Group
	group.SetLimit(writesAtOnce)
	for i, u := range list {
		group.Go(func() error {
			results[i], errs[i] = c.client.CoreV1().Services(u.after.Namespace).UpdateStatus(ctx, u.after, metav1.UpdateOptions{})
			return nil
		})
	}
	_ = group.Wait()
	for i, u := range list {
		if errs[i] == nil {
			u.done = true
			c.noteWritten(ctx, u.outcome, results[i])
		}
		errs[i] = ignoreRaces(errs[i])
	}
	return errors.Join(errs...)
}

// noteWritten remembers what was written.
func (c *Controller) noteWritten(ctx context.Context, o *servicelb.Outcome, now *v1.Service) {
	s := o.Service
	note := &written{base: s.ResourceVersion, version: now.ResourceVersion, ingress: o.Ingress}
	if was := c.written[s.UID]; was != nil {
		note.overwritten, note.seen, note.until = was.overwritten, was.seen, was.until
	}
	c.written[s.UID] = note
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
}

// leaveAlone reports whether a status that another controller has overwritten must not be written yet. The growing delay keeps two
// controllers from replacing each other's addresses in a loop.
func (c *Controller) leaveAlone(ctx context.Context, s *v1.Service, was *written) bool {
	now := time.Now()
	if s.ResourceVersion != was.version && s.ResourceVersion != was.seen && !sameIngress(s.Status.LoadBalancer.Ingress, was.ingress) {
		was.seen = s.ResourceVersion
		if now.Sub(was.until) > 2*maxPause {
			was.overwritten = 0
		}
		pause := min(firstPause<<min(was.overwritten, 16), maxPause)
		was.overwritten++
		was.until = now.Add(pause)
		by := c.writerOf(ctx, s)
		klog.FromContext(ctx).Info("Another controller overwrites the status of a Service", "service", klog.KObj(s), "by", by, "addresses", texts(s.Status.LoadBalancer.Ingress), "retryIn", pause)
		c.recorder.Eventf(s, v1.EventTypeWarning, "StatusOverwritten",
			"%s replaced the LoadBalancer addresses by %v; they are written again in %v. Turn that controller off, or give the Service the class of one of the two", by, texts(s.Status.LoadBalancer.Ingress), pause)
		time.AfterFunc(pause, c.changed)
	}
	return now.Before(was.until)
}

// writerOf names who wrote the status of a Service last, by the API server.
func (c *Controller) writerOf(ctx context.Context, s *v1.Service) string {
	const unknown = "another controller"
	now, err := c.client.CoreV1().Services(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
	if err != nil {
		return unknown
	}
	name, last := unknown, time.Time{}
	for _, f := range now.ManagedFields {
		if f.Subresource == "status" && f.Time != nil && f.Time.After(last) && !strings.HasPrefix(f.Manager, "servicelb") {
			name, last = fmt.Sprintf("%.63q", f.Manager), f.Time.Time
		}
	}
	return name
}

// told is what Events said of a Service last.
type told struct{ reasons, warnings, ignored string }

// tell writes Events about what a Service lacks, what else its owner should know, and annotations without an effect, each once. What it waits
// for is no news.
func (c *Controller) tell(o *servicelb.Outcome) {
	lacks := slices.DeleteFunc(slices.Clone(o.Reasons), func(r servicelb.Reason) bool { return r.Code == servicelb.Probing })
	now := told{reasonsText(lacks), reasonsText(o.Warnings), strings.Join(o.Ignored, ", ")}
	last := c.told[o.Service.UID]
	c.told[o.Service.UID] = now
	if now.reasons != last.reasons && len(lacks) > 0 {
		c.recorder.Event(o.Service, v1.EventTypeWarning, string(lacks[0].Code), now.reasons)
	}
	if now.warnings != last.warnings && now.warnings != "" {
		c.recorder.Event(o.Service, v1.EventTypeWarning, string(o.Warnings[0].Code), now.warnings)
	}
	if now.ignored != last.ignored && now.ignored != "" {
		c.recorder.Eventf(o.Service, v1.EventTypeNormal, "IgnoredAnnotation", "there are no pods for these annotations to apply to: %s", now.ignored)
	}
}

// withdraw takes what was written off a Service that ServiceLB does not serve any more, as its type is another one now, and the finalizers
// of K3s' controller before, which would keep it once it is deleted.
func (c *Controller) withdraw(ctx context.Context, s *v1.Service) error {
	if s.Spec.Type == v1.ServiceTypeLoadBalancer || !hasConditions(s) {
		return nil
	}
	if slices.ContainsFunc(s.Finalizers, isOfK3s) {
		return c.finish(ctx, s) // its event leads here again
	}
	_, err := Forget(ctx, c.client, s, true)
	return err
}

// ignoreRaces is for objects that changed or went meanwhile: their event is under way.
func ignoreRaces(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func sameCondition(s *v1.Service, now *metav1.Condition) bool {
	known := meta.FindStatusCondition(s.Status.Conditions, now.Type)
	return known != nil && known.Status == now.Status && known.Reason == now.Reason && known.Message == now.Message
}

func probingOf(s *v1.Service) string {
	if known := meta.FindStatusCondition(s.Status.Conditions, nodereport.ConditionProbing); known != nil {
		return known.Message
	}
	return ""
}

func probingText(list []netip.Addr) string {
	var parts []string
	slices.SortFunc(list, netip.Addr.Compare)
	for _, a := range list[:min(len(list), maxProbing)] {
		parts = append(parts, a.String())
	}
	return strings.Join(parts, ", ")
}

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
func sourceText(o *servicelb.Outcome) string {
	switch {
	case o.Service.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal:
		return "endpoints see the client's address"
	case o.Direct:
		return "endpoints see the client's address, by direct server return"
	}
	return "endpoints on the node that a client dials see the client's address; others see that node's (SNAT), as without direct server return their replies have to pass it"
}

// sameIngress compares all that a status may have: another controller may have written it.
func sameIngress(a, b []v1.LoadBalancerIngress) bool {
	return slices.EqualFunc(a, b, func(a, b v1.LoadBalancerIngress) bool {
		return a.IP == b.IP && a.Hostname == b.Hostname && len(a.Ports) == 0 && a.IPMode != nil && b.IPMode != nil && *a.IPMode == *b.IPMode
	})
}

func texts(list []v1.LoadBalancerIngress) (out []string) {
	for _, i := range list {
		out = append(out, i.IP)
	}
	return out
}
