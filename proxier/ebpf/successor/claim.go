// SPDX-License-Identifier: Apache-2.0

package successor

import (
	"context"
	"errors"
	"fmt"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Claim tells the programs of an earlier process that this process belongs to the same
// project: they do not take it for another kube-proxy, whatever its mode.
type Claim struct {
	// Maps are those of the programs; none if there are no programs.
	Maps []*Map
}

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
	self, known := SelfOrZero(klog.FromContext(ctx)), map[ciliumebpf.MapID]bool{}
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
	m := maps[MapName]
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
	value, err := Open(m)
	if err != nil {
		return err
	}
	value.Claim(self)
	c.Maps = append(c.Maps, value)
	return nil
}

// Run says that this process is alive until ctx is done.
func (c *Claim) Run(ctx context.Context) {
	Beat(ctx, c.Maps...)
	_ = c.close() // unmaps memory that is mapped
}

func (c *Claim) close() (err error) {
	for _, m := range c.Maps {
		err = errors.Join(err, m.Close())
	}
	c.Maps = nil
	return err
}

// Beat says that the owner of these maps is alive until ctx is done.
func Beat(ctx context.Context, maps ...*Map) {
	ticker := time.NewTicker(BeatInterval)
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

// SelfOrZero is Self; 0, which it logs, if the kernel does not tell.
func SelfOrZero(logger klog.Logger) uint32 {
	self, err := Self()
	if err != nil {
		logger.Error(err, "Cannot determine the PID of this process in the initial PID namespace; if it hangs for longer than --ebpf-yield-grace-period, its eBPF programs treat it as another kube-proxy")
	}
	return self
}
