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

// ipvsDevice has the addresses of Services in mode ipvs. They are not addresses of the node.
const ipvsDevice = "kube-ipvs0"

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
		ipvs := 0
		if link, err := netlink.LinkByName(ipvsDevice); err == nil {
			ipvs = link.Attrs().Index
		} else if _, none := errors.AsType[netlink.LinkNotFoundError](err); !none {
			return err
		}
		found, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, a := range found {
			if ip, ok := netip.AddrFromSlice(a.IP); ok && a.LinkIndex != ipvs {
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
