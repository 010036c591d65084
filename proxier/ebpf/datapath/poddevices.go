// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/kernel/sockdiag"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// PodDevices are the devices of pods whose sockets are not served, or which send packets without
// sockets. Programs on the devices serve them instead.
type PodDevices struct {
	Served map[int]Variant // by index
	// Seen are devices by which untranslated packets for frontends came in. They are served for
	// as long as they exist.
	Seen map[int]struct{}
	// known are the devices of network namespaces by their cookies; empty where none
	// was found.
	known map[uint64][]veth
	// unknown are those that the last search, which failed, did not find.
	unknown map[uint64]struct{}
	looked  time.Time
}

// veth is a pair of devices by their indexes, each in its namespace.
type veth struct{ host, pod int }

// searchInterval is the time between two searches through all network namespaces.
const searchInterval = 30 * time.Second

// retryInterval is that after a search that failed.
const retryInterval = 5 * time.Second

// See notes that an untranslated packet for a frontend came in by a device. On a bridge it stands for the
// port that the packet came from: replies of other ports do not pass the bridge itself. It returns the
// name of the device to be served, or nothing if it is known already. It is called in the node's network
// namespace.
func (d *PodDevices) See(device int, source net.HardwareAddr, uplinks []devices.Device) (name string, err error) {
	if d.isKnown(device, uplinks) {
		return "", nil
	}
	link, err := netlink.LinkByIndex(device)
	if err != nil {
		return "", fmt.Errorf("find device %d: %w", device, err)
	}
	if link.Type() == "bridge" {
		port, err := bridgePort(device, source)
		if err != nil || port == 0 || d.isKnown(port, uplinks) {
			return "", err
		}
		if link, err = netlink.LinkByIndex(port); err != nil {
			return "", fmt.Errorf("find port %d of bridge %d: %w", port, device, err)
		}
	}
	if link.Attrs().Flags&net.FlagLoopback != 0 {
		return "", nil
	}
	d.Keep([]int{link.Attrs().Index})
	return link.Attrs().Name, nil
}

// Keep notes devices whose packets are served for as long as they exist.
func (d *PodDevices) Keep(list []int) {
	if d.Seen == nil {
		d.Seen = map[int]struct{}{}
	}
	for _, device := range list {
		d.Seen[device] = struct{}{}
	}
}

func (d *PodDevices) isKnown(device int, uplinks []devices.Device) bool {
	_, seen := d.Seen[device]
	_, served := d.Served[device]
	return seen || served || slices.ContainsFunc(uplinks, func(u devices.Device) bool { return u.Index == device })
}

// bridgePort returns the port of a bridge behind which a link-layer address is; 0 if the bridge does not
// know.
func bridgePort(bridge int, at net.HardwareAddr) (int, error) {
	entries, err := netlink.NeighListExecute(netlink.Ndmsg{Family: unix.AF_BRIDGE})
	if err != nil {
		return 0, fmt.Errorf("list forwarding entries of bridges: %w", err)
	}
	for _, e := range entries {
		if e.MasterIndex == bridge && e.LinkIndex != bridge && bytes.Equal(e.HardwareAddr, at) {
			return e.LinkIndex, nil
		}
	}
	return 0, nil
}

// Update finds the devices of the network namespaces that opted out, those that match a pattern, and those
// seen that still exist. It is called in the node's network namespace.
func (d *PodDevices) Update(ctx context.Context, cookies []uint64, patterns []string, uplinks []devices.Device, pods proxier.Detector, procRoot string) error {
	if len(cookies) == 0 && len(patterns) == 0 && len(d.Seen) == 0 {
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

// Of returns the devices of a network namespace that Update found.
func (d *PodDevices) Of(cookie uint64) (list []int) {
	for _, pair := range d.known[cookie] {
		if _, ok := d.Served[pair.host]; ok {
			list = append(list, pair.host)
		}
	}
	return list
}

// Unknown reports whether the search for the devices of a network namespace failed.
func (d *PodDevices) Unknown(cookie uint64) bool {
	_, failed := d.unknown[cookie]
	return failed
}

// find looks for namespaces whose devices are not known.
func (d *PodDevices) find(ctx context.Context, cookies []uint64, procRoot string) error {
	missing, interval := map[uint64]struct{}{}, searchInterval
	for _, cookie := range cookies {
		if len(d.known[cookie]) > 0 {
			continue
		}
		missing[cookie] = struct{}{}
		if d.Unknown(cookie) {
			interval = retryInterval
		} else if _, ok := d.known[cookie]; !ok {
			d.looked = time.Time{} // it is new
		}
	}
	if len(missing) == 0 || time.Since(d.looked) < interval {
		return nil
	}
	d.looked, d.unknown = time.Now(), nil
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
		links, err := listLinks()
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
	if err == nil {
		return nil
	}
	d.unknown = missing
	maps.DeleteFunc(d.unknown, func(cookie uint64, _ struct{}) bool { return len(known[cookie]) > 0 })
	if len(d.unknown) == 0 {
		return nil // all are found
	}
	return err
}

// listLinks lists the devices of this network namespace, once more if they change meanwhile.
func listLinks() ([]netlink.Link, error) {
	links, err := netlink.LinkList()
	if errors.Is(err, netlink.ErrDumpInterrupted) {
		links, err = netlink.LinkList()
	}
	return links, err
}

// variants are the devices that are there, and the programs that they need: those of these
// network namespaces, and those whose names match a pattern.
func (d *PodDevices) variants(cookies []uint64, patterns []string, uplinks []devices.Device, pods proxier.Detector) (map[int]Variant, error) {
	links, err := listLinks()
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
	for index := range d.Seen {
		if slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Attrs().Index == index }) {
			wanted[index] = struct{}{}
		} else {
			delete(d.Seen, index)
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
