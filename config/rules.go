// SPDX-License-Identifier: Apache-2.0

package config

import "time"

// Rules are settings that differ between upstream's modes iptables and nftables.
type Rules struct {
	MasqueradeBit             int
	MasqueradeAll             bool
	SyncPeriod, MinSyncPeriod time.Duration
	NodePortAddresses         []string
	// LocalhostNodePorts serves NodePorts at loopback addresses that NodePortAddresses
	// includes.
	LocalhostNodePorts bool
}

// Rules returns the settings of the configured mode: those of the section nftables in mode
// nftables, and those of the section iptables in all others. Mode nftables serves NodePorts at
// the node's own addresses by default, and not at loopback addresses.
func (c *Config) Rules() Rules {
	k := &c.KubeProxy
	if k.Mode == ModeNFTables {
		n := &k.NFTables
		r := Rules{
			MasqueradeBit: int(*n.MasqueradeBit), MasqueradeAll: n.MasqueradeAll,
			SyncPeriod: n.SyncPeriod.Duration, MinSyncPeriod: n.MinSyncPeriod.Duration,
			NodePortAddresses: k.NodePortAddresses,
		}
		if len(r.NodePortAddresses) == 0 {
			r.NodePortAddresses = []string{"primary"}
		}
		return r
	}
	i := &k.IPTables
	return Rules{
		MasqueradeBit: int(*i.MasqueradeBit), MasqueradeAll: i.MasqueradeAll,
		SyncPeriod: i.SyncPeriod.Duration, MinSyncPeriod: i.MinSyncPeriod.Duration,
		NodePortAddresses: k.NodePortAddresses, LocalhostNodePorts: *i.LocalhostNodePorts,
	}
}
