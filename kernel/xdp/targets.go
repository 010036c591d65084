// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	vishvananda "github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/netlink"
)

// Of include/uapi/linux/netdev.h.
const (
	netdevFamily  = "netdev"
	netdevDevGet  = 1 // NETDEV_CMD_DEV_GET
	netdevIndex   = 1 // NETDEV_A_DEV_IFINDEX
	netdevXDP     = 3 // NETDEV_A_DEV_XDP_FEATURES
	canSendOthers = 4 // NETDEV_XDP_ACT_NDO_XMIT
)

// Targets returns the devices, by index, that send what XDP programs of other devices redirect to them, as they are set up now.
// Kernels before 6.3 do not tell; of those it returns none.
func Targets(ctx context.Context) (map[int]bool, error) {
	family, err := vishvananda.GenlFamilyGet(netdevFamily)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the netlink family %s: %w", netdevFamily, err)
	}
	c, err := netlink.Open(unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	defer c.Close()
	targets := map[int]bool{}
	request := append(netlink.Begin(nil, family.ID, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, 1), netdevDevGet, uint8(family.Version), 0, 0)
	if err = c.Send(netlink.End(request, 0)); err == nil {
		err = c.Receive(ctx, func(m netlink.Message) (done bool, err error) {
			switch m.Kind {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				return true, m.Errno()
			case family.ID:
				return false, addTarget(targets, m.Body)
			}
			return false, nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("ask what devices do with XDP: %w", err)
	}
	return targets, nil
}

// addTarget adds the device of a message, if it is a target.
func addTarget(targets map[int]bool, b []byte) error {
	if len(b) < nl.SizeofGenlmsg {
		return errors.New("short message")
	}
	var index uint32
	var features uint64
	err := netlink.EachAttr(b[nl.SizeofGenlmsg:], func(kind uint16, v []byte) error {
		switch {
		case kind == netdevIndex && len(v) == 4:
			index = binary.NativeEndian.Uint32(v)
		case kind == netdevXDP && len(v) == 8:
			features = binary.NativeEndian.Uint64(v)
		}
		return nil
	})
	if features&canSendOthers != 0 {
		targets[int(index)] = true
	}
	return err
}
