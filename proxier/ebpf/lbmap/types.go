// SPDX-License-Identifier: Apache-2.0

package lbmap

// The structures of bpf/lb_types.h under their Go names.
type (
	FrontendKey   = sockFrontendKey
	FrontendValue = sockFrontend
	Backend       = sockBackend
	Service       = sockService
	ServiceStats  = sockServiceStats
	RangeKey      = sockRangeKey
	Node          = sockNode
	Prefix        = sockPrefix
	Meta          = sockMeta
	SocketDest    = sockSockDest
	AffinityKey   = sockAffinityKey
	Affinity      = sockAffinity
	UDPPeerKey    = sockUdpPeerKey
	UDPPeer       = sockUdpPeer
	// PortSpan is a range of source ports as the programs have it.
	PortSpan = tcPortRange
)
