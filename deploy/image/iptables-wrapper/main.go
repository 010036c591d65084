// SPDX-License-Identifier: Apache-2.0

// Iptables-wrapper stands in the image for the commands of iptables without a variant in their
// name, and runs those of the variant that the node uses, which package xtables tells
// kube-proxy as well.
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

// dir has the programs of both variants, and none without one in its name: where nothing
// tells the variant, Find asks that, and it is this one.
const dir = "/usr/sbin"

func main() {
	err := run()
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// run returns if it fails.
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
