// SPDX-License-Identifier: Apache-2.0

package ebpf

import "github.com/tandem-proxy/tandem/proxier"

// Bits of backendEntry.Flags.
const (
	backendLocal = 1 << iota
	backendTerminating
)

func backendFlags(b *proxier.Backend) uint32 {
	var f uint32
	if b.Local {
		f |= backendLocal
	}
	if b.Terminating {
		f |= backendTerminating
	}
	return f
}
