// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/tc"
)

// EachServedDevice calls fn with the devices of this network namespace that have programs of
// the proxy, and with their programs at ingress.
func EachServedDevice(fn func(device *netlink.LinkAttrs, found []tc.Attachment) error) error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		found, err := tc.Find(l.Attrs().Index, tc.Ingress, IsOwnProgram)
		if err != nil || len(found) == 0 {
			continue // a device that cannot be inspected has been deleted meanwhile
		}
		errs = append(errs, fn(l.Attrs(), found))
		tc.Close(found)
	}
	return errors.Join(errs...)
}

// DetachDevice takes the programs of the proxy off a device, and returns their names.
func DetachDevice(device int) (removed []string, err error) {
	var errs []error
	// What it passes would meet nothing that knows the connection.
	there, err := decelerate(device)
	if errs = append(errs, err); there && err == nil {
		removed = append(removed, xdpProgram)
	}
	for _, h := range PacketHooks {
		found, err := tc.Find(device, h.Direction, IsOwnProgram)
		if err != nil {
			if !errors.Is(err, tc.ErrNoDevice) {
				errs = append(errs, err)
			}
			continue
		}
		for _, a := range found {
			if err := tc.Detach(a); err != nil && !errors.Is(err, tc.ErrNoDevice) {
				errs = append(errs, err)
				continue
			}
			if info, err := a.Program.Info(); err == nil {
				removed = append(removed, info.Name)
			}
		}
		tc.Close(found)
	}
	return removed, errors.Join(errs...)
}

// DetachDevices takes the programs of the proxy off every device of this network namespace.
func DetachDevices() (removed []string, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		names, err := DetachDevice(l.Attrs().Index)
		removed = append(removed, names...)
		errs = append(errs, err)
	}
	return removed, errors.Join(errs...)
}
