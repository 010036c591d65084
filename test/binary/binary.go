// SPDX-License-Identifier: Apache-2.0

// Package binary builds this repository's kube-proxy as it is shipped: for benchmarks, as a
// test program is larger, and for tests that are in another module.
package binary

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// KubeProxy builds it into a directory, and returns its path. The test has to be of a
// package two directories below the module, where go test runs it.
func KubeProxy(dir string) (string, error) { return Build(dir, "kube-proxy") }

// Build does the same with any program of cmd.
func Build(dir, program string) (string, error) {
	path := filepath.Join(dir, program)
	c := exec.Command("go", "build", "-C", "../..", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", path, "./cmd/"+program)
	c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=")
	if text, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", program, err, text)
	}
	return path, nil
}
