// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Servers says who served the clients outside so far: rules where conntrack has a connection of
// theirs to a Service with another destination, programs elsewhere.
func (w *World) Servers(cells []Cell) (Servers, error) {
	translated := map[netip.AddrPort]bool{}
	err := w.Node.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
		if err != nil {
			return fmt.Errorf("open netlink of %s: %w", w.Node.Name, err)
		}
		defer h.Close()
		for _, f := range w.families() {
			list, err := h.ConntrackTableList(netlink.ConntrackTable, map[Family]netlink.InetFamily{IPv4: unix.AF_INET, IPv6: unix.AF_INET6}[f])
			if err != nil {
				return fmt.Errorf("list connections of %s: %w", w.Node.Name, err)
			}
			for _, c := range list {
				if !c.Forward.DstIP.Equal(c.Reverse.SrcIP) || c.Forward.DstPort != c.Reverse.SrcPort {
					addr, _ := netip.AddrFromSlice(c.Forward.DstIP)
					translated[netip.AddrPortFrom(addr.Unmap(), c.Forward.DstPort)] = true
				}
			}
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	by := map[bool]bool{}
	for _, c := range cells {
		if c.outside() && len(w.wants(c)) > 0 {
			by[translated[w.target(c)]] = true
		}
	}
	switch {
	case by[true] && by[false]:
		return ByBoth, nil
	case by[true]:
		return ByRules, nil
	}
	return ByPrograms, nil
}
