// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// AnyTranslated reports whether the destination of any connection is translated. It returns true if
// that is unknown.
func AnyTranslated(family inet.Family) bool {
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, [inet.Families]netlink.InetFamily{unix.AF_INET, unix.AF_INET6}[family])
	return err != nil || slices.ContainsFunc(flows, func(f *netlink.ConntrackFlow) bool { return !f.Forward.DstIP.Equal(f.Reverse.SrcIP) })
}
