// SPDX-License-Identifier: Apache-2.0

package ebpf

// The structures of bpf/lb_types.h under their Go names.
type (
	frontendKey   = sockFrontendKey
	frontendValue = sockFrontend
	backendEntry  = sockBackend
	serviceEntry  = sockService
	serviceStats  = sockServiceStats
	rangeKey      = sockRangeKey
	nodeEntry     = sockNode
	nodePrefix    = sockPrefix
	metaEntry     = sockMeta
	sockDest      = sockSockDest
	affinityKey   = sockAffinityKey
	affinity      = sockAffinity
	udpPeerKey    = sockUdpPeerKey
	udpPeer       = sockUdpPeer
	// portSpan is a range of source ports as the programs have it.
	portSpan = tcPortRange
)
