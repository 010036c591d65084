// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/kernel/sockdiag"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// PodDevices are the devices of pods whose sockets are not served. Programs on the devices
// serve them instead.
type PodDevices struct {
	Served map[int]Variant // by index
	// known are the devices of network namespaces by their cookies; empty where none
	// was found.
	known  map[uint64][]veth
	looked time.Time
}

// veth is a pair of devices by their indexes, each in its namespace.
type veth struct{ host, pod int }

// searchInterval is the time between two searches through all network namespaces.
const searchInterval = 30 * time.Second

// Update finds the devices of the network namespaces that opted out, and those that match a
// pattern. It is called in the node's network namespace.
func (d *PodDevices) Update(ctx context.Context, cookies []uint64, patterns []string, uplinks []devices.Device, pods proxier.Detector, procRoot string) error {
	if len(cookies) == 0 && len(patterns) == 0 {
		d.Served = nil
		return nil
	}
	err := d.find(ctx, cookies, procRoot)
	on, listErr := d.variants(cookies, patterns, uplinks, pods)
	if listErr == nil {
		d.Served = on
	}
	return errors.Join(err, listErr)
}

// find looks for namespaces whose devices are not known.
func (d *PodDevices) find(ctx context.Context, cookies []uint64, procRoot string) error {
	missing := map[uint64]struct{}{}
	for _, cookie := range cookies {
		if len(d.known[cookie]) == 0 {
			if _, ok := d.known[cookie]; !ok {
				d.looked = time.Time{} // it is new
			}
			missing[cookie] = struct{}{}
		}
	}
	if len(missing) == 0 || time.Since(d.looked) < searchInterval {
		return nil
	}
	d.looked = time.Now()
	known := map[uint64][]veth{}
	for _, cookie := range cookies {
		known[cookie] = d.known[cookie]
	}
	d.known = known
	err := sockdiag.ForEachNetNS(ctx, procRoot, func(sockdiag.NetNS) error {
		cookie, err := netns.Cookie()
		if err != nil {
			return err
		}
		if _, ok := missing[cookie]; !ok {
			return nil
		}
		links, err := netlink.LinkList()
		if err != nil {
			return fmt.Errorf("list the devices of namespace %d: %w", cookie, err)
		}
		for _, l := range links {
			if peer := l.Attrs().ParentIndex; peer != 0 {
				known[cookie] = append(known[cookie], veth{peer, l.Attrs().Index})
			}
		}
		return nil
	})
	for cookie := range missing {
		if len(known[cookie]) == 0 {
			return err // which may be why
		}
	}
	return nil
}

// variants are the devices that are there, and the programs that they need: those of these
// network namespaces, and those whose names match a pattern.
func (d *PodDevices) variants(cookies []uint64, patterns []string, uplinks []devices.Device, pods proxier.Detector) (map[int]Variant, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	wanted := map[int]struct{}{}
	for _, cookie := range cookies {
		for _, pair := range d.known[cookie] {
			// The peer may be in a third namespace, and this index another device.
			if slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Attrs().Index == pair.host && l.Attrs().ParentIndex == pair.pod }) {
				wanted[pair.host] = struct{}{}
			}
		}
	}
	if len(patterns) > 0 {
		named, _ := devices.Named(links, patterns)
		for _, device := range named {
			wanted[device.Index] = struct{}{}
		}
	}
	for _, device := range uplinks {
		delete(wanted, device.Index)
	}
	on := map[int]Variant{}
	for _, l := range links {
		a := l.Attrs()
		if _, ok := wanted[a.Index]; !ok {
			continue
		}
		v := Variant{Role: lbmap.RolePod, L3: a.EncapType != "ether"}
		if pods.Interface != "" {
			v.FromPod = pods.Local(netip.Addr{}, a.Name)
		}
		on[a.Index] = v
	}
	return on, nil
}
