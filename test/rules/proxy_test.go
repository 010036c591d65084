// SPDX-License-Identifier: Apache-2.0

//go:build linux

package rules

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// build makes our kube-proxy as it is shipped: a test program is larger.
func build(dir string) (string, error) {
	path := filepath.Join(dir, "kube-proxy")
	c := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, "../../cmd/kube-proxy")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build kube-proxy: %w\n%s", err, text)
	}
	return path, nil
}
