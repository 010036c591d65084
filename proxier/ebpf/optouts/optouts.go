// SPDX-License-Identifier: Apache-2.0

// Package optouts keeps the network namespaces whose sockets are not load-balanced in line with the Pods
// and Namespaces that ask for it, in a map that commands write as well.
package optouts

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/podns"
)

// Set are the opt-outs by Pods and Namespaces. It is not safe for concurrent use.
type Set struct {
	told bool // Want was called
	want proxier.OptOuts
	// Finder finds the network namespaces of pods.
	Finder *podns.Finder
	report func(proxier.Problem)
	// own are the network namespaces that this process found opted out by pods, with the pod's UID in names
	// of cgroups. Others may have been left by an earlier process.
	own map[uint64]string
}

// New returns opt-outs of pods that the finder finds.
func New(finder *podns.Finder, report func(proxier.Problem)) *Set {
	return &Set{Finder: finder, report: report, own: map[uint64]string{}}
}

// Want sets the pods that opt out.
func (s *Set) Want(o proxier.OptOuts) { s.told, s.want = true, o }

// Changes are all opt-outs, and what is to be changed in the map.
type Changes struct {
	m      *ciliumebpf.Map
	in     map[uint64]lbmap.OptOutBy
	add    map[uint64]proxier.OptedOutPod
	remove []uint64
}

// Cookies are those of all network namespaces that are opted out, or about to be.
func (c *Changes) Cookies() []uint64 {
	all := slices.Collect(maps.Keys(c.in))
	for cookie := range c.add {
		all = append(all, cookie)
	}
	slices.Sort(all)
	return all
}

// Read compares the opt-outs in the map with those wanted. in runs a function in the network namespace of
// the host.
func (s *Set) Read(m *ciliumebpf.Map, in func(func() error) error) (*Changes, error) {
	there, err := lbmap.OptOuts(m)
	if err != nil {
		return nil, err
	}
	c := &Changes{m: m, in: there, add: map[uint64]proxier.OptedOutPod{}}
	if !s.told {
		return c, nil
	}
	var found podns.Found
	if err := in(func() error { found = s.Finder.Find(s.want.Pods); return nil }); err != nil {
		return c, err
	}
	for _, pod := range found.Late {
		s.tell(pod, proxier.ReasonUnsupported, notFound(found.Err))
	}
	for cookie, pod := range found.Cookies {
		switch by, known := there[cookie]; {
		case !known:
			c.add[cookie] = pod
		case by == lbmap.OptOutByPod:
			s.own[cookie] = pod.CgroupUID
		}
	}
	// A pod without a process keeps its network namespace, as while its only container starts again.
	keeps := map[string]bool{}
	for _, pod := range s.want.Pods {
		keeps[pod.CgroupUID] = true
	}
	for _, pod := range found.Cookies {
		delete(keeps, pod.CgroupUID)
	}
	for cookie, by := range there {
		_, wanted := found.Cookies[cookie]
		uid, own := s.own[cookie]
		if by == lbmap.OptOutByPod && !wanted && (own && !keeps[uid] || !own && s.want.Complete && !found.Missing) {
			c.remove = append(c.remove, cookie)
		}
	}
	return c, nil
}

func notFound(err error) string {
	text := "no process of the pod was found, so its sockets are load-balanced; kube-proxy has to run in the pid namespace of the host (hostPID: true)"
	if err != nil {
		text += ": " + err.Error()
	}
	return text
}

// Remove deletes what no pod asks for any more.
func (s *Set) Remove(ctx context.Context, c *Changes) error {
	var errs []error
	for _, cookie := range c.remove {
		if err := c.m.Delete(cookie); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("remove opt-out %d: %w", cookie, err))
			continue
		}
		delete(c.in, cookie)
		delete(s.own, cookie)
		klog.FromContext(ctx).V(2).Info("Removed the opt-out of a network namespace from socket load balancing", "netNSCookie", cookie)
	}
	return errors.Join(errs...)
}

// Add adds what pods ask for, as far as served says that programs serve the packets which leave the sockets of a
// network namespace untranslated from then on.
func (s *Set) Add(ctx context.Context, c *Changes, served func(cookie uint64) bool) error {
	var errs []error
	for cookie, pod := range c.add {
		if !served(cookie) {
			continue // the caller has told why, and tries again
		}
		// One that a command has just added is left to the command.
		err := c.m.Update(cookie, uint8(lbmap.OptOutByPod), ciliumebpf.UpdateNoExist)
		switch {
		case errors.Is(err, ciliumebpf.ErrKeyExist):
		case errors.Is(err, unix.E2BIG):
			s.tell(pod, proxier.ReasonCapacity, fmt.Sprintf("all %d opt-outs are in use, so its sockets are load-balanced; see --ebpf-max-opt-outs", c.m.MaxEntries()))
		case err != nil:
			errs = append(errs, fmt.Errorf("add opt-out %d: %w", cookie, err))
		default:
			s.own[cookie] = pod.CgroupUID
			klog.FromContext(ctx).V(2).Info("A pod opted out of socket load balancing", "pod", klog.KRef(pod.Object.Namespace, pod.Object.Name), "field", pod.Field, "netNSCookie", cookie)
		}
	}
	return errors.Join(errs...)
}

func (s *Set) tell(p proxier.OptedOutPod, reason, message string) {
	s.report(proxier.Problem{Kind: "Pod", Object: p.Object, UID: p.UID, Field: p.Field, Reason: reason, Message: message})
}
