// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"fmt"
	"strings"
)

// Kernel is a kernel that tests can run under.
type Kernel struct {
	// Name is a version, or Newest.
	Name string
	// Suite is the suite of Debian whose newest cloud kernel it is. Suites keep only the
	// latest point releases, so none can be pinned.
	Suite string
	// CPU is the model that QEMU emulates for it.
	CPU string
}

// cpu has all features that QEMU emulates, except five-level page tables, which are slow.
const cpu = "max,la57=off"

// oldCPU has no cmpxchg16b, for kernels whose allocators do not require it. With cmpxchg16b, QEMU 7
// may lose EFLAGS: rarely, after an exception right behind it, the kernel continues with random
// flags and crashes. Newer kernels need it for kmalloc_nolock(), and so for socket storage.
const oldCPU = cpu + ",cx16=off"

// Newest is the name of the newest kernel there is.
const Newest = "newest"

// Kernels are all kernels that can be downloaded, oldest first.
var Kernels = []Kernel{
	{"5.10", "bullseye", oldCPU},
	{"6.1", "bookworm", oldCPU},
	{"6.12", "trixie", oldCPU},
	{Newest, "sid", cpu},
}

// metapackage depends on a suite's current kernel. Cloud kernels have all that tests
// need, and boot faster than those with drivers for hardware.
const metapackage = "linux-image-cloud-amd64"

// Find returns the kernel with a name.
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
