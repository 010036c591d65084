// SPDX-License-Identifier: Apache-2.0

package ebpf

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

// podOptOuts are the opt-outs by Pods and Namespaces.
type podOptOuts struct {
	told   bool // SetOptOuts was called
	want   proxier.OptOuts
	finder *podns.Finder
	// own are the network namespaces that this process found opted out by pods. Others may have
	// been left by an earlier process.
	own map[uint64]struct{}
}

// SetOptOuts sets the pods that opt out of socket load balancing, soon. Their established connections
// stay as they are. It has no effect where others serve the sockets of pods.
func (t *Tier) SetOptOuts(o proxier.OptOuts) {
	t.mu.Lock()
	t.podOptOuts.told, t.podOptOuts.want = true, o
	t.mu.Unlock()
	select {
	case t.optOutsChanged <- struct{}{}:
	default: // it will be looked at
	}
}

// optOuts are all opt-outs, and what is to be changed in the map.
type optOuts struct {
	in     map[uint64]lbmap.OptOutBy
	add    map[uint64]proxier.OptedOutPod
	remove []uint64
}

// cookies are those of all network namespaces that are opted out, or about to be.
func (o *optOuts) cookies() []uint64 {
	all := slices.Collect(maps.Keys(o.in))
	for cookie := range o.add {
		all = append(all, cookie)
	}
	slices.Sort(all)
	return all
}

// readOptOuts compares the opt-outs in the map with those wanted. It is called with mu held.
func (t *Tier) readOptOuts() (*optOuts, error) {
	in, err := lbmap.OptOuts(t.maps["tdm_optout"])
	if err != nil {
		return nil, err
	}
	p, o := &t.podOptOuts, &optOuts{in: in, add: map[uint64]proxier.OptedOutPod{}}
	if !p.told {
		return o, nil
	}
	var found podns.Found
	if err := t.netns.Do(func() error { found = p.finder.Find(p.want.Pods); return nil }); err != nil {
		return o, err
	}
	for _, pod := range found.Late {
		t.reportOptOut(pod, proxier.ReasonUnsupported, notFound(found.Err))
	}
	for cookie, pod := range found.Cookies {
		switch by, there := in[cookie]; {
		case !there:
			o.add[cookie] = pod
		case by == lbmap.OptOutByPod:
			p.own[cookie] = struct{}{}
		}
	}
	for cookie, by := range in {
		_, wanted := found.Cookies[cookie]
		_, own := p.own[cookie]
		if by == lbmap.OptOutByPod && !wanted && (own || p.want.Complete && !found.Missing) {
			o.remove = append(o.remove, cookie)
		}
	}
	return o, nil
}

func notFound(err error) string {
	text := "no process of the pod was found, so its sockets are load-balanced; kube-proxy has to run in the pid namespace of the host (hostPID: true)"
	if err != nil {
		text += ": " + err.Error()
	}
	return text
}

// removeOptOuts deletes what no pod asks for any more. It is called with mu held.
func (t *Tier) removeOptOuts(ctx context.Context, o *optOuts) error {
	var errs []error
	for _, cookie := range o.remove {
		if err := t.maps["tdm_optout"].Delete(cookie); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("remove opt-out %d: %w", cookie, err))
			continue
		}
		delete(o.in, cookie)
		delete(t.podOptOuts.own, cookie)
		klog.FromContext(ctx).V(2).Info("A network namespace is not opted out of socket load balancing any more", "netNSCookie", cookie)
	}
	return errors.Join(errs...)
}

// addOptOuts adds what pods ask for. Before that, programs have to serve the packets which leave their sockets
// untranslated from then on. It is called with mu held.
func (t *Tier) addOptOuts(ctx context.Context, o *optOuts) error {
	var errs []error
	for cookie, pod := range o.add {
		if !t.podDevicesServed(cookie) {
			continue // serveDevices has told why, and is tried again
		}
		// One that a command has just added is left to the command.
		err := t.maps["tdm_optout"].Update(cookie, uint8(lbmap.OptOutByPod), ciliumebpf.UpdateNoExist)
		switch {
		case errors.Is(err, ciliumebpf.ErrKeyExist):
		case errors.Is(err, unix.E2BIG):
			t.reportOptOut(pod, proxier.ReasonCapacity, fmt.Sprintf("all %d opt-outs are in use, so its sockets are load-balanced; see --ebpf-max-opt-outs", t.maps["tdm_optout"].MaxEntries()))
		case err != nil:
			errs = append(errs, fmt.Errorf("add opt-out %d: %w", cookie, err))
		default:
			t.podOptOuts.own[cookie] = struct{}{}
			klog.FromContext(ctx).V(2).Info("A pod opted out of socket load balancing", "pod", klog.KRef(pod.Object.Namespace, pod.Object.Name), "field", pod.Field, "netNSCookie", cookie)
		}
	}
	return errors.Join(errs...)
}

// podDevicesServed says whether the devices of a network namespace, as far as there are any, have
// programs.
func (t *Tier) podDevicesServed(cookie uint64) bool {
	if !t.opts.packets() {
		return true // rules serve
	}
	for _, device := range t.podDevices.Of(cookie) {
		if _, served := t.devices.Served[device]; !served {
			return false
		}
	}
	return true
}

func (t *Tier) reportOptOut(p proxier.OptedOutPod, reason, message string) {
	if t.opts.Reporter != nil {
		t.opts.Reporter.Report(proxier.Problem{Kind: "Pod", Object: p.Object, UID: p.UID, Field: p.Field, Reason: reason, Message: message})
	}
}
