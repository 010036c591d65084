// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Generation returns a number that increases with every change of rules in the network namespace of
// the calling thread, by any program.
func Generation() (n uint32, err error) {
	const (
		ask    = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN
		answer = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
	)
	request := nl.NewNetlinkRequest(ask, 0)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	messages, err := request.Execute(unix.NETLINK_NETFILTER, answer)
	if err != nil {
		return 0, fmt.Errorf("query the generation of nf_tables: %w", err)
	}
	for _, m := range messages {
		attributes, err := nl.ParseRouteAttr(m[nl.SizeofNfgenmsg:])
		if err != nil {
			return 0, fmt.Errorf("read the generation of nf_tables: %w", err)
		}
		for _, a := range attributes {
			if a.Attr.Type&nl.NLA_TYPE_MASK == unix.NFTA_GEN_ID && len(a.Value) == 4 {
				return binary.BigEndian.Uint32(a.Value), nil
			}
		}
	}
	return 0, fmt.Errorf("the kernel's reply has no generation of nf_tables")
}
