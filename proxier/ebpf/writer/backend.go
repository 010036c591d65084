// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

func backendFlags(b *proxier.Backend) uint32 {
	var f uint32
	if b.Local {
		f |= lbmap.BackendLocal
	}
	if b.Remote {
		f |= lbmap.BackendRemote
	}
	if b.Terminating {
		f |= lbmap.BackendTerminating
	}
	return f
}

func inSet(b *proxier.Backend, s proxier.Set) bool { return membersOf(b)&setBit(s) != 0 }

// membersOf is what the programs have for b.Members: a bit per set.
func membersOf(b *proxier.Backend) uint8 {
	if b.Addr.Addr().Is4() {
		return uint8(b.Members)
	}
	return uint8(b.Members) << proxier.V6Cluster
}

func setBit(s proxier.Set) uint8 { return 1 << s }

// served reports whether a frontend is to be in the tables.
func served(f *proxier.Frontend) bool { return f.Conflict == nil && !f.IsLeft() }
