// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/tc"
)

// Silence has the programs that an earlier process left translate no connection that
// they do not translate yet. It is for who cannot Open the tier, and so cannot Drain it:
// the programs stay, and with them the connections there are.
func Silence(cgroupRoot string) error {
	cgroup, err := datapath.OpenCgroup(cgroupRoot)
	if err != nil {
		return err
	}
	defer cgroup.Close()
	// A process that still runs would write its frontends again.
	if err := datapath.Lock(cgroup); err != nil {
		return err
	}
	return silence(cgroup)
}

// silence takes away what leads to backends from all programs that are attached. The
// backends stay: flows ask for theirs.
func silence(cgroup *os.File) error {
	return eachInUse(cgroup, func(program *ciliumebpf.Program) error {
		maps, err := lbmap.MapsOf(program)
		if err != nil {
			return err
		}
		defer maps.Close()
		// Ranges first: what is no frontend any more would be rejected there.
		return errors.Join(forgetPrefixes(maps["tdm_node"]), lbmap.DeleteAll(maps["tdm_frontend"]), lbmap.DeleteAll(maps["tdm_vip"]))
	})
}

// forgetPrefixes has programs find none in either element of the node map. The prefixes
// themselves stay: who is just reading them would find that a cleared one has every
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

// eachInUse calls fn with the programs of the proxy that are attached: to the cgroup, and to
// what comes in by devices of this network namespace.
func eachInUse(cgroup *os.File, fn func(*ciliumebpf.Program) error) error {
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
