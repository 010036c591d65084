// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"fmt"
	"os"
	"runtime"
)

func main() {
	fmt.Fprintf(os.Stderr, "The demo needs Linux: network namespaces, cgroups and eBPF. This is %s; a small virtual machine will do.\n", runtime.GOOS)
	os.Exit(1)
}
