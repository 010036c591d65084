// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ErrNoBond means that the kernel has no bonds.
var ErrNoBond = errors.New("the kernel has no devices of type bond")

// Spare is the second link of a node whose uplink is a bond.
const Spare = "eth1"

// Bond makes the uplink of a node a bond with this name: Uplink is its active member, and Spare takes over when that one's link
// fails. The fabric does not learn by which of them the node is reached, so both get every packet, as from a switch that floods.
func (n *Node) Bond(name string) error {
	l := n.lab
	l.mu.Lock()
	defer l.mu.Unlock()
	bond := netlink.NewLinkBond(netlink.LinkAttrs{Name: name, MTU: n.mtu})
	bond.Mode, bond.Miimon = netlink.BOND_MODE_ACTIVE_BACKUP, 100
	if err := n.nl.LinkAdd(bond); errors.Is(err, unix.EOPNOTSUPP) {
		return ErrNoBond
	} else if err != nil {
		return fmt.Errorf("create bond %s: %w", name, err)
	}
	was, err := n.remember(Uplink)
	if err != nil {
		return err
	}
	for _, a := range was.addrs {
		if err := n.nl.AddrDel(was.link, &a); err != nil {
			return fmt.Errorf("move address %s to %s: %w", a.IPNet, name, err)
		}
	}
	spare := n.FabricLink + "b"
	if err := n.plugSpare(spare); err != nil {
		return err
	}
	for _, member := range []string{Uplink, Spare} {
		link, err := n.nl.LinkByName(member)
		if err == nil {
			err = errors.Join(n.nl.LinkSetDown(link), n.nl.LinkSetMaster(link, bond))
		}
		if err != nil {
			return fmt.Errorf("add %s to %s: %w", member, name, err)
		}
	}
	was.link.Attrs().Name = name
	if err := was.restore(n.Sandbox); err != nil {
		return err
	}
	return errors.Join(l.fabric.awaitLink(n.FabricLink), l.fabric.awaitLink(spare))
}

// plugSpare makes a second link to the fabric, which learns nothing from either.
func (n *Node) plugSpare(fabricLink string) error {
	f := n.lab.fabric
	if err := n.plugAs(fabricLink, Spare); err != nil {
		return err
	}
	for _, port := range []string{n.FabricLink, fabricLink} {
		link, err := f.nl.LinkByName(port)
		if err == nil {
			err = f.nl.LinkSetLearning(link, false)
		}
		if err != nil {
			return fmt.Errorf("set port %s of the fabric: %w", port, err)
		}
	}
	return nil
}
