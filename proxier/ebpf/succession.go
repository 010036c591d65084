// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
)

// Claim tells the programs of an earlier process that this process belongs to the same
// project: they do not take it for another kube-proxy, whatever its mode.
type Claim struct{ maps []*successor.Map }

// NewClaim is called before this process binds the ports of a kube-proxy. Without programs on the
// cgroup there is nothing to claim. It needs CAP_SYS_ADMIN, as programs do.
func NewClaim(ctx context.Context, cgroupRoot string) (_ *Claim, err error) {
	cgroup, err := datapath.OpenCgroup(cgroupRoot)
	if err != nil {
		return nil, err
	}
	defer cgroup.Close()
	found, err := datapath.FindAttached(cgroup)
	if err != nil {
		return nil, err
	}
	defer datapath.CloseAttached(found)
	c := &Claim{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	self, known := selfOf(klog.FromContext(ctx)), map[ciliumebpf.MapID]bool{}
	for _, a := range found {
		if err := c.add(a.Program, self, known); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// add claims the map of a program, unless it is known.
func (c *Claim) add(program *ciliumebpf.Program, self uint32, known map[ciliumebpf.MapID]bool) error {
	maps, err := lbmap.MapsOf(program)
	if err != nil {
		return err
	}
	defer maps.Close()
	m := maps[successor.MapName]
	if m == nil {
		return nil // another layout has none
	}
	info, err := m.Info()
	if err != nil {
		return fmt.Errorf("inspect %s: %w", m, err)
	}
	if id, _ := info.ID(); known[id] {
		return nil
	} else {
		known[id] = true
	}
	value, err := successor.Open(m)
	if err != nil {
		return err
	}
	value.Claim(self)
	c.maps = append(c.maps, value)
	return nil
}

// Run says that this process is alive until ctx is done.
func (c *Claim) Run(ctx context.Context) {
	beat(ctx, c.maps...)
	_ = c.close() // unmaps memory that is mapped
}

func (c *Claim) close() (err error) {
	for _, m := range c.maps {
		err = errors.Join(err, m.Close())
	}
	c.maps = nil
	return err
}

// beat says that this process is alive until ctx is done.
func beat(ctx context.Context, maps ...*successor.Map) {
	ticker := time.NewTicker(successor.BeatInterval)
	defer ticker.Stop()
	for {
		for _, m := range maps {
			m.Beat()
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// selfOf is this process's number in the initial pid namespace; 0 if it is unknown.
func selfOf(logger klog.Logger) uint32 {
	self, err := successor.Self()
	if err != nil {
		logger.Error(err, "Cannot find the number of this process in the initial pid namespace; if it hangs for longer than the yield grace period, its programs take it for another kube-proxy")
	}
	return self
}

// own makes this process the owner of the maps. Where programs left new connections to another
// kube-proxy, they do so until these maps hold everything.
func (t *Tier) own(ctx context.Context) (err error) {
	if t.successor, err = successor.Open(t.maps[successor.MapName]); err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	t.successor.Own(selfOf(logger), t.opts.Ports, t.opts.YieldGrace)
	if y, yielded := t.successor.Yielded(); yielded {
		t.setLastYield(y)
		logger.Info("Another kube-proxy took over while this one was not running; the eBPF programs leave new connections to it until the first sync",
			"since", y.Since.Format(time.RFC3339), "process", y.Process, "pid", y.PID)
	}
	return nil
}

// takeBack has the programs accept new connections again, now that the maps hold everything.
func (t *Tier) takeBack(ctx context.Context) {
	if y, yielded := t.successor.Yielded(); yielded {
		t.setLastYield(y)
		t.successor.TakeBack()
		klog.FromContext(ctx).Info("The eBPF programs accept new connections again, which they had left to another kube-proxy",
			"since", y.Since.Format(time.RFC3339), "process", y.Process, "pid", y.PID)
	}
}

func (t *Tier) setLastYield(y successor.Yield) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lastYield = y.Since
}

// LastYield is when programs began to leave new connections to another kube-proxy, as this
// process found them; zero if they did not.
func (t *Tier) LastYield() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.lastYield
}
