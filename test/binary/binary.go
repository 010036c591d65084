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
func KubeProxy(dir string) (string, error) {
	path := filepath.Join(dir, "kube-proxy")
	c := exec.Command("go", "build", "-C", "../..", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", path, "./cmd/kube-proxy")
	c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=")
	if text, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build kube-proxy: %w\n%s", err, text)
	}
	return path, nil
}
