// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command imagelayers makes the layers of the image, and prints their directories as test/image expects them in
// its variable, for tests on a machine that cannot make them:
//
//	TANDEM_IMAGE_LAYERS=$(go run ./test/image/imagelayers <directory of the upper layer>)
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/tandem-proxy/tandem/deploy/image"
	cached "github.com/tandem-proxy/tandem/test/image"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "imagelayers:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return errors.New("it takes one argument: a directory")
	}
	base, err := cached.MakeRootFS(".")
	if err != nil {
		return err
	}
	if err := image.BuildPrograms(".", filepath.Join(args[0], image.Programs), runtime.GOARCH); err != nil {
		return err
	}
	_, err = fmt.Printf("%s:%s\n", args[0], base)
	return err
}
