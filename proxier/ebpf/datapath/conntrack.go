// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// loadConntrack has the kernel load its conntrack module. Without it, programs that look up
// conntrack entries cannot be loaded. It asks for statistics, which does not start tracking.
func loadConntrack() error {
	const stats = 5 // IPCTNL_MSG_CT_GET_STATS
	// The answer claims to be one of several; the acknowledgement ends it.
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|stats, unix.NLM_F_ACK)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	if _, err := request.Execute(unix.NETLINK_NETFILTER, 0); err != nil {
		return fmt.Errorf("load the kernel's conntrack module: %w", err)
	}
	return nil
}
