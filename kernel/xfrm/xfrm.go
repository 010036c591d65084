// SPDX-License-Identifier: Apache-2.0

// Package xfrm reports whether this host has policies of IPsec.
package xfrm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	rtnl "github.com/tandem-proxy/tandem/kernel/netlink"
)

// groupPolicy is XFRMNLGRP_POLICY of linux/xfrm.h, as a mask.
const groupPolicy = 1 << 3

// Acts reports whether a policy of the calling thread's network namespace encrypts or blocks packets that
// leave. Policies of sockets do not count, nor those of xfrm interfaces, which packets pass that are
// routed there. A kernel without IPsec has none. It needs CAP_NET_ADMIN.
func Acts() (bool, error) {
	list, err := netlink.XfrmPolicyList(netlink.FAMILY_ALL)
	switch {
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL):
		return false, nil
	case err != nil && !errors.Is(err, netlink.ErrDumpInterrupted):
		return false, fmt.Errorf("list policies of IPsec: %w", err)
	}
	return slices.ContainsFunc(list, acts), nil
}

func acts(p netlink.XfrmPolicy) bool {
	leaves := p.Dir == netlink.XFRM_DIR_OUT || p.Dir == netlink.XFRM_DIR_FWD
	return leaves && p.Ifid == 0 && (len(p.Tmpls) > 0 || p.Action == netlink.XFRM_POLICY_BLOCK)
}

// NewFollower calls list at first and after each change of a policy in this network namespace.
func NewFollower(list func() error) rtnl.Follower {
	return rtnl.Follower{
		What: "policies of IPsec", Protocol: unix.NETLINK_XFRM, Groups: groupPolicy,
		Run: func(fn func() error) error { return fn() }, List: list,
	}
}
