// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// loadConntrack has the kernel load its conntrack, which may be a module that comes with
// the first rule that needs it: programs loaded before could not look into it any more.
// It asks how many connections there are, and so has nothing tracked by itself.
func loadConntrack() error {
	const stats = 5 // IPCTNL_MSG_CT_GET_STATS
	// The answer alone claims to be one of several, and the last never comes.
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|stats, unix.NLM_F_ACK)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	if _, err := request.Execute(unix.NETLINK_NETFILTER, 0); err != nil {
		return fmt.Errorf("load the kernel's conntrack module: %w", err)
	}
	return nil
}
