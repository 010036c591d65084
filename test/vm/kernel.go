// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"fmt"
	"strings"
)

// Kernel is one that tests can run under.
type Kernel struct {
	// Name is what users say: a version, or Newest.
	Name string
	// Suite of Debian whose newest cloud kernel it is. Point releases come and go
	// there, so that none can be pinned.
	Suite string
	// CPU is the model that QEMU emulates for it.
	CPU string
}

// cpu is all that QEMU emulates but for page tables of five levels, which only take time.
const cpu = "max,la57=off"

// oldCPU is for kernels that have another way. With cmpxchg16b, which their allocators use,
// QEMU 7 loses track of EFLAGS: rarely, an exception right behind it has a kernel go on with random
// flags, and die. Newer kernels have no kmalloc_nolock() without it, and so no socket storage.
const oldCPU = cpu + ",cx16=off"

// Newest is the name of the newest kernel there is.
const Newest = "newest"

// Kernels are those that can be fetched, oldest first.
var Kernels = []Kernel{
	{"5.10", "bullseye", oldCPU},
	{"6.1", "bookworm", oldCPU},
	{"6.12", "trixie", oldCPU},
	{Newest, "sid", cpu},
}

// metapackage depends on a suite's current kernel. Cloud kernels have all that tests
// need, and boot faster than those with drivers for hardware.
const metapackage = "linux-image-cloud-amd64"

// Find returns the kernel of a name.
func Find(name string) (Kernel, error) {
	var names []string
	for _, k := range Kernels {
		if k.Name == name {
			return k, nil
		}
		names = append(names, k.Name)
	}
	return Kernel{}, fmt.Errorf("no kernel %q, there are %s", name, strings.Join(names, ", "))
}
