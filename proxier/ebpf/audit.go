// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
)

// auditInterval is the time between two audits of what is attached. The kernel does not tell of
// programs that are detached from cgroups or tcx. An audit of three uplinks takes a tenth of
// a millisecond.
const auditInterval = time.Second

// Uplink is the state of the programs on an uplink.
type Uplink struct {
	devices.Device
	// Err is why clients may not be served there; nil if they are.
	Err error
	// Accelerated is why XDP does not forward there; nil if it does.
	Accelerated error
}

// Uplinks are the devices by which node traffic comes in, as the last audit saw them.
func (t *Tier) Uplinks() []Uplink {
	if list := t.audited.Load(); list != nil {
		return *list
	}
	return nil
}

// ForeignPrograms are programs of others on the cgroup that can refuse a connection of a socket, or
// change its destination, by name, id and hook.
func (t *Tier) ForeignPrograms() []string {
	t.gen.RLock()
	defer t.gen.RUnlock()
	return t.hooks.Foreign()
}

// followAttachments audits what is attached until ctx is done.
func (t *Tier) followAttachments(ctx context.Context) {
	ticker := time.NewTicker(auditInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := t.audit(ctx); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Cannot check or repair what eBPF programs are attached; trying again", "interval", auditInterval)
		}
	}
}

// audit attaches again what other processes detached, and moves programs past foreign ones that
// were attached ahead.
func (t *Tier) audit(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.attached {
		return nil
	}
	lost, err := t.hooks.Audit()
	t.repairedCgroup(lost, err)
	if t.waiting {
		return err
	}
	return errors.Join(err, t.auditDevices(ctx))
}

// auditDevices is called with mu held.
func (t *Tier) auditDevices(ctx context.Context) error {
	var found []datapath.Trouble
	err := t.netns.Do(func() error {
		found = t.devices.Audit(ctx)
		return t.devices.SetTargets(ctx)
	})
	t.troubles = found
	t.publishUplinks()
	for _, trouble := range found {
		name := t.nameOf(trouble.Device)
		switch {
		case trouble.Err == nil && trouble.Lost:
			t.repaired(proxier.RepairedDevice, fmt.Sprintf("device %s had %s; attached again", name, trouble))
		case trouble.Err == nil:
			t.repaired(proxier.RepairedOrder, fmt.Sprintf("on device %s %s; the proxy's program runs first again", name, trouble))
		case trouble.Lost:
			err = errors.Join(err, fmt.Errorf("device %s: %w", name, trouble.Err))
		default:
			t.reportBypass(name, trouble)
		}
	}
	return err
}

// reportBypass tells of foreign programs that cannot be overtaken.
func (t *Tier) reportBypass(device string, trouble datapath.Trouble) {
	t.report(proxier.Problem{
		Kind: "Node", Reason: proxier.ReasonBypassed,
		Message: fmt.Sprintf("on device %s %s; clients outside are not served if it does not pass packets on, and the proxy's program cannot run first: %v", device, trouble, trouble.Err),
	})
}

func (t *Tier) report(p proxier.Problem) {
	if t.opts.Reporter != nil {
		t.opts.Reporter.Report(p)
	}
}

func (t *Tier) repairedCgroup(lost []string, err error) {
	if len(lost) > 0 && err == nil {
		t.repaired(proxier.RepairedCgroup, fmt.Sprintf("cgroup %s lacked %s; attached again", t.cgroup.Name(), strings.Join(lost, ", ")))
	}
}

func (t *Tier) repaired(state proxier.RepairedState, what string) {
	if t.opts.Repaired != nil {
		t.opts.Repaired(proxier.Repair{State: state, What: what})
	}
}

// publishUplinks is called with mu held, after each audit and each change of the uplinks.
func (t *Tier) publishUplinks() {
	list := make([]Uplink, len(t.uplinks))
	for i, d := range t.uplinks {
		list[i].Device = d
		list[i].Accelerated = t.accelerated[d.Index]
		if _, served := t.devices.Served[d.Index]; !served {
			list[i].Err = errors.New("programs are not attached")
		}
		for _, trouble := range t.troubles {
			if trouble.Device == d.Index && trouble.Err != nil {
				list[i].Err = fmt.Errorf("%s: %w", trouble, trouble.Err)
			}
		}
	}
	t.audited.Store(&list)
}

// nameOf is the name of a device that is served. It is called with mu held.
func (t *Tier) nameOf(index int) string {
	if i := slices.IndexFunc(t.uplinks, func(d devices.Device) bool { return d.Index == index }); i >= 0 {
		return t.uplinks[i].Name
	}
	name := ""
	_ = t.netns.Do(func() error {
		device, err := net.InterfaceByIndex(index)
		if err == nil {
			name = device.Name
		}
		return err
	})
	return cmp.Or(name, fmt.Sprint(index))
}
