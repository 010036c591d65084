// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// ChainName is a chain of a table.
type ChainName struct{ Table, Chain string }

// Uses describes chains of the nft variant by one number each: how many rules they have, and
// how many rules jump to them. It costs one netlink request for each chain, however many rules
// there are. So it tells quickly whether another program has emptied chains, or removed the
// jumps to them. For the legacy variant, which has Sizes, ok is false.
func (t *Tools) Uses(family inet.Family, chains ...ChainName) (text string, ok bool, err error) {
	if t.variant != NFT {
		return "", false, nil
	}
	var b strings.Builder
	for _, c := range chains {
		n, found, err := chainUse(family, c)
		if err != nil {
			return "", false, fmt.Errorf("query the use of chain %s of table %s: %w", c.Chain, c.Table, err)
		}
		fmt.Fprintf(&b, "%s %s: %v %d\n", c.Table, c.Chain, found, n)
	}
	return b.String(), true, nil
}

func chainUse(family inet.Family, c ChainName) (n uint32, found bool, err error) {
	const (
		ask    = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETCHAIN
		answer = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWCHAIN
	)
	protocol := uint8(unix.NFPROTO_IPV4)
	if family == inet.IPv6 {
		protocol = unix.NFPROTO_IPV6
	}
	request := nl.NewNetlinkRequest(ask, 0)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: protocol, Version: nl.NFNETLINK_V0})
	request.AddData(nl.NewRtAttr(unix.NFTA_CHAIN_TABLE, nl.ZeroTerminated(c.Table)))
	request.AddData(nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated(c.Chain)))
	messages, err := request.Execute(unix.NETLINK_NETFILTER, answer)
	if errors.Is(err, unix.ENOENT) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	for _, m := range messages {
		attributes, err := nl.ParseRouteAttr(m[nl.SizeofNfgenmsg:])
		if err != nil {
			return 0, false, err
		}
		for _, a := range attributes {
			if a.Attr.Type&nl.NLA_TYPE_MASK == unix.NFTA_CHAIN_USE && len(a.Value) == 4 {
				return binary.BigEndian.Uint32(a.Value), true, nil
			}
		}
	}
	return 0, false, errors.New("the kernel's reply has no use count")
}
