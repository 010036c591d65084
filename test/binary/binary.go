// SPDX-License-Identifier: Apache-2.0

// Package binary builds this repository's kube-proxy as it is shipped: for benchmarks, as a
// test program is larger, and for tests that are in another module.
package binary

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// KubeProxy builds it into a directory, and returns its path. The test has to be of a
// package two directories below the module, where go test runs it.
func KubeProxy(dir string) (string, error) { return Build(dir, "kube-proxy") }

// Build does the same with any program of cmd.
func Build(dir, program string) (string, error) { return build("../..", dir, program) }

// ErrNoHistory means that the sources of earlier commits are not there: a shallow clone, or no repository.
var ErrNoHistory = errors.New("the history of the repository")

// KubeProxyOf builds the kube-proxy of an earlier commit into a directory.
func KubeProxyOf(commit, dir string) (string, error) {
	if _, err := os.Stat("../../.git"); errors.Is(err, fs.ErrNotExist) {
		return "", ErrNoHistory
	}
	shallow, err := exec.Command("git", "-C", "../..", "rev-parse", "--is-shallow-repository").CombinedOutput()
	switch {
	case err != nil:
		return "", fmt.Errorf("look whether the repository has its history: %w\n%s", err, shallow)
	case strings.TrimSpace(string(shallow)) != "false":
		return "", ErrNoHistory
	}
	sources := filepath.Join(dir, "sources")
	if err := os.Mkdir(sources, 0o755); err != nil {
		return "", err
	}
	archive := exec.Command("git", "-C", "../..", "archive", "--format=tar", "--output", filepath.Join(dir, "sources.tar"), commit)
	if text, err := archive.CombinedOutput(); err != nil {
		return "", fmt.Errorf("sources of commit %s: %w\n%s", commit, err, text)
	}
	if text, err := exec.Command("tar", "-x", "-C", sources, "-f", filepath.Join(dir, "sources.tar")).CombinedOutput(); err != nil {
		return "", fmt.Errorf("unpack commit %s: %w\n%s", commit, err, text)
	}
	return build(sources, dir, "kube-proxy")
}

func build(sources, dir, program string) (string, error) {
	path := filepath.Join(dir, program)
	c := exec.Command("go", "build", "-C", sources, "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", path, "./cmd/"+program)
	c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=")
	if text, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", program, err, text)
	}
	return path, nil
}
