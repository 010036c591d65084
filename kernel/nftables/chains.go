// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package nftables reads the chains of nf_tables through netlink. It changes nothing.
package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/netlink"
)

// Chain is a chain of nf_tables. Those that iptables' nft variant writes are among them.
type Chain struct {
	// Family is ip, ip6, inet, arp, bridge or netdev.
	Family string `json:"family"`
	Table  string `json:"table"`
	Name   string `json:"name"`
	// Type, Hook, Priority and Policy are of base chains; Hook is empty for others. Type is
	// filter, nat or route. Hook is that of the IP families: prerouting, input, forward,
	// output or postrouting; HookIngress is that of devices. Policy is accept or drop.
	Type     string `json:"type,omitempty"`
	Hook     string `json:"hook,omitempty"`
	Priority int    `json:"priority,omitempty"`
	Policy   string `json:"policy,omitempty"`
}

// PriorityDNAT is the priority at which prerouting chains of type nat translate destinations.
const PriorityDNAT = -100

// HookIngress is the hook of packets that come in by a device, in the families netdev and inet.
const HookIngress = "ingress"

const inetIngress = 5 // NF_INET_INGRESS

const subsystem = unix.NFNL_SUBSYS_NFTABLES << 8

// NF_DROP and NF_ACCEPT of include/uapi/linux/netfilter.h.
const drop, accept = uint32(0), uint32(1)

var (
	families = map[uint8]string{unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_ARP: "arp", unix.NFPROTO_NETDEV: "netdev", unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_IPV6: "ip6"}
	hooks    = []string{"prerouting", "input", "forward", "output", "postrouting"}
)

func familyNumber(name string) uint8 {
	for number, text := range families {
		if text == name {
			return number
		}
	}
	return unix.NFPROTO_UNSPEC
}

// Chains lists the chains of all families in the network namespace of the calling thread. The
// request makes the kernel load nf_tables if it is a module. It needs CAP_NET_ADMIN.
func Chains(ctx context.Context) (list []Chain, err error) {
	err = dump(ctx, request(unix.NFT_MSG_GETCHAIN, unix.NFPROTO_UNSPEC, nil), func(m netlink.Message) error {
		if m.Kind != subsystem|unix.NFT_MSG_NEWCHAIN {
			return nil
		}
		c, err := parseChain(m.Body)
		list = append(list, c)
		return err
	})
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, nil // a kernel without nf_tables, or any netlink of netfilter
	}
	if err != nil {
		return nil, fmt.Errorf("list chains of nf_tables: %w", err)
	}
	return list, nil
}

const genericLen = 4 // struct nfgenmsg

func request(kind uint16, family uint8, attributes []byte) []byte {
	b := append(netlink.Begin(nil, subsystem|kind, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, 1), family, unix.NFNETLINK_V0, 0, 0)
	return netlink.End(append(b, attributes...), 0)
}

func dump(ctx context.Context, request []byte, each func(netlink.Message) error) error {
	c, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Send(request); err != nil {
		return err
	}
	return c.Receive(ctx, func(m netlink.Message) (done bool, err error) {
		if m.Kind == unix.NLMSG_DONE || m.Kind == unix.NLMSG_ERROR {
			return true, m.Errno()
		}
		return false, each(m)
	})
}

var errShort = errors.New("parse a message of nf_tables: too short")

func parseChain(b []byte) (c Chain, err error) {
	if len(b) < genericLen {
		return c, errShort
	}
	c.Family = families[b[0]]
	policy := accept
	err = netlink.EachAttr(b[genericLen:], func(kind uint16, v []byte) (err error) {
		switch kind {
		case unix.NFTA_CHAIN_TABLE:
			c.Table = text(v)
		case unix.NFTA_CHAIN_NAME:
			c.Name = text(v)
		case unix.NFTA_CHAIN_TYPE:
			c.Type = text(v)
		case unix.NFTA_CHAIN_POLICY:
			policy, err = number(v)
		case unix.NFTA_CHAIN_HOOK:
			err = c.parseHook(v)
		}
		return err
	})
	if c.Hook != "" {
		c.Policy = "accept"
		if policy == drop {
			c.Policy = "drop"
		}
	}
	return c, err
}

func (c *Chain) parseHook(b []byte) error {
	return netlink.EachAttr(b, func(kind uint16, v []byte) error {
		n, err := number(v)
		switch kind {
		case unix.NFTA_HOOK_HOOKNUM:
			switch c.Hook = fmt.Sprint(n); {
			case c.Family == "netdev" && n == 0, c.Family == "inet" && n == inetIngress:
				c.Hook = HookIngress
			case int(n) < len(hooks) && c.Family != "netdev" && c.Family != "arp":
				c.Hook = hooks[n]
			}
		case unix.NFTA_HOOK_PRIORITY:
			c.Priority = int(int32(n))
		default:
			return nil // devices are no numbers
		}
		return err
	})
}

// text is a string without the zero that ends it.
func text(v []byte) string {
	if n := len(v); n > 0 && v[n-1] == 0 {
		v = v[:n-1]
	}
	return string(v)
}

func number(v []byte) (uint32, error) {
	if len(v) < 4 {
		return 0, errShort
	}
	return binary.BigEndian.Uint32(v), nil
}
