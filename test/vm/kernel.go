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
}

// Newest is the name of the newest kernel there is.
const Newest = "newest"

// Kernels are those that can be fetched, oldest first.
var Kernels = []Kernel{
	{"5.10", "bullseye"},
	{"6.1", "bookworm"},
	{"6.12", "trixie"},
	{Newest, "sid"},
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
