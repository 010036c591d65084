// SPDX-License-Identifier: Apache-2.0

package nodefacts

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	rtnl "github.com/tandem-proxy/tandem/kernel/netlink"
)

// ipvsDevices have the addresses of Services for virtual servers, of kube-proxy in mode ipvs and of
// kube-router's service proxy. They are not addresses of the node.
var ipvsDevices = []string{"kube-ipvs0", "kube-dummy-if"}

// Addresses lists and watches the addresses of this node's devices.
type Addresses struct {
	// In runs a function on a thread in the network namespace to watch; nil means that
	// of the process.
	In func(func() error) error
}

func (w *Addresses) in(fn func() error) error {
	if w.In != nil {
		return w.In(fn)
	}
	return fn()
}

// List returns the addresses, sorted, each once.
func (w *Addresses) List() (list []netip.Addr, err error) {
	err = w.in(func() error {
		var ipvs []int // their indexes
		for _, name := range ipvsDevices {
			if link, err := netlink.LinkByName(name); err == nil {
				ipvs = append(ipvs, link.Attrs().Index)
			} else if _, none := errors.AsType[netlink.LinkNotFoundError](err); !none {
				return err
			}
		}
		found, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, a := range found {
			if ip, ok := netip.AddrFromSlice(a.IP); ok && !slices.Contains(ipvs, a.LinkIndex) {
				list = append(list, ip.Unmap())
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list), nil
}

// Watch calls tell with the addresses, first and whenever they may have changed, until ctx is
// done.
func (w *Addresses) Watch(ctx context.Context, tell func([]netip.Addr)) {
	follower := rtnl.Follower{
		What: "the node's addresses", Groups: unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR, Run: w.in,
		List: func() error {
			list, err := w.List()
			if err == nil {
				tell(list)
			}
			return err
		},
	}
	follower.Follow(ctx)
}
