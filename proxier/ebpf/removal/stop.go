// SPDX-License-Identifier: Apache-2.0

package removal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// StopNewConnections has the programs of an earlier process accept no new connections. It is for a process
// that cannot Open the tier, and so cannot Drain it: the programs stay, and with them the
// established connections.
func StopNewConnections(ctx context.Context, cgroupRoot string) error {
	cgroup, err := datapath.OpenCgroup(cgroupRoot)
	if err != nil {
		return err
	}
	defer cgroup.Close()
	// A process that still runs would write its frontends again.
	lock, err := datapath.Lock(ctx, cgroup)
	if err != nil {
		return err
	}
	defer lock.Close()
	return Frontends(cgroup)
}

// Frontends removes frontends, targets and prefixes from the maps of all attached programs. The backends
// stay: flows refer to them.
func Frontends(cgroup *os.File) error {
	return EachInUse(cgroup, func(program *ciliumebpf.Program) error {
		maps, err := lbmap.MapsOf(program)
		if err != nil {
			return err
		}
		defer maps.Close()
		// Prefixes first: packets to removed frontends in a ServiceCIDR would be rejected.
		return errors.Join(forgetPrefixes(maps["tdm_node"]), lbmap.DeleteAll(maps["tdm_frontend"]), lbmap.DeleteAll(maps["tdm_vip"]), lbmap.DeleteAll(maps["tdm_target"]))
	})
}

// forgetPrefixes sets the numbers of prefixes to 0 in both elements of the node map. The
// prefixes themselves stay: to a program that is reading them, a cleared one would match every
// address.
func forgetPrefixes(m *ciliumebpf.Map) error {
	if m == nil {
		return nil
	}
	for i := range m.MaxEntries() {
		value, err := m.LookupBytes(i)
		if err != nil {
			return fmt.Errorf("read the node's prefixes: %w", err)
		}
		clear(value[:unsafe.Offsetof(lbmap.Node{}.Pods)])
		if err := m.Put(i, value); err != nil {
			return fmt.Errorf("write the node's prefixes: %w", err)
		}
	}
	return nil
}

// EachInUse calls fn with the programs of the proxy that are attached: to the cgroup, and to
// the ingress of devices of this network namespace.
func EachInUse(cgroup *os.File, fn func(*ciliumebpf.Program) error) error {
	found, err := datapath.FindAttached(cgroup)
	if err != nil {
		return err
	}
	defer datapath.CloseAttached(found)
	var errs []error
	for _, a := range found {
		errs = append(errs, fn(a.Program))
	}
	return errors.Join(append(errs, datapath.EachServedDevice(func(_ *netlink.LinkAttrs, found []tc.Attachment) error {
		var errs []error
		for _, a := range found {
			errs = append(errs, fn(a.Program))
		}
		return errors.Join(errs...)
	}))...)
}
