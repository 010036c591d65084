// SPDX-License-Identifier: Apache-2.0

package ebpf

import "github.com/tandem-proxy/tandem/proxier"

func backendFlags(b *proxier.Backend) uint32 {
	var f uint32
	if b.Local {
		f |= BackendLocal
	}
	if b.Terminating {
		f |= BackendTerminating
	}
	return f
}
