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
)

// What bpf/lb_maps.h says of the layout.
const (
	metaMagic     = 0x6d65646e6174
	layoutVersion = 3
)

// States and reasons of a serviceEntry.
const (
	serviceFree       = 0
	serviceProgrammed = 1
	serviceUnplaced   = 2
)

// Scopes of a frontendKey.
const (
	scopeAddress = 0
	scopeNode    = 1
)
