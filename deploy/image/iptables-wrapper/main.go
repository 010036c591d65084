// SPDX-License-Identifier: Apache-2.0

// Iptables-wrapper replaces, in the image, the iptables commands whose names contain no
// variant. It runs the variant that the node uses, which it detects with package xtables, as
// kube-proxy does.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// dir has the programs of both variants, and none without a variant in its name: such a
// program would be this one, and detection would run it where nothing else shows the variant.
const dir = "/usr/sbin"

func main() {
	err := run()
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// run only returns if it fails.
func run() error {
	tools, err := xtables.FindIn(context.Background(), dir)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, program(filepath.Base(os.Args[0]), tools.Variant()))
	return fmt.Errorf("run %s: %w", path, syscall.Exec(path, os.Args, os.Environ()))
}

// program is a name with the variant in it: iptables-save may be iptables-nft-save.
func program(name string, v xtables.Variant) string {
	plain, what, _ := strings.Cut(name, "-")
	return strings.TrimSuffix(plain+"-"+v.String()+"-"+what, "-")
}
