// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Programs is where our programs are in the image.
const Programs = "usr/local/bin"

// Scripts are files of a source tree that say what RootFS makes.
func Scripts(source string) []string {
	return []string{filepath.Join(source, "deploy/image/rootfs.sh"), filepath.Join(source, "deploy/image/debs.sh")}
}

// RootFS makes the directory of what our programs need, for an architecture by Go's name. It downloads packages of Debian.
func RootFS(source, dir, arch string) error {
	if out, err := exec.Command(Scripts(source)[0], dir, arch).CombinedOutput(); err != nil {
		return fmt.Errorf("make the file system of the image: %w\n%s", err, out)
	}
	return nil
}

// BuildPrograms builds our programs into a directory, which becomes Programs, with further flags of go build.
func BuildPrograms(source, dir, arch string, flags ...string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	args := slices.Concat([]string{"build", "-trimpath", "-buildvcs=false", "-o", dir + "/"}, flags, []string{"./cmd/...", "./deploy/image/iptables-wrapper"})
	build := exec.Command("go", args...)
	build.Dir, build.Env = source, append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the programs of the image: %w\n%s", err, strings.TrimSpace(string(out)))
	}
	return nil
}
