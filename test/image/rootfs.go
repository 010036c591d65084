// SPDX-License-Identifier: Apache-2.0

// Package image keeps the layers of the image, as package deploy/image makes them. Its tests run kube-proxy on
// real traffic as a container runtime would: on these layers, with the mounts and
// capabilities of manifests, and nothing else of the node.
package image

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/tandem-proxy/tandem/deploy/image"
	"github.com/tandem-proxy/tandem/test/lab"
)

// LayersEnv has the layers that Layers returns, the topmost first and with colons between them, where they were
// made before: a machine of test/vm has nothing that makes them.
const LayersEnv = "TANDEM_IMAGE_LAYERS"

// Layers are the directories of the image, the topmost first. The source directory is that of the main module.
func Layers(tb lab.TB, source string) []string {
	tb.Helper()
	if made := os.Getenv(LayersEnv); made != "" {
		return strings.Split(made, ":")
	}
	top, err := os.MkdirTemp("", "image-")
	if err != nil {
		tb.Fatalf("%v", err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(top) })
	base := RootFS(tb, source)
	Build(tb, source, filepath.Join(top, image.Programs))
	return []string{top, base}
}

// RootFS returns the directory of the lower layer: what our programs need. It is kept in the
// user's cache, as it is made of packages that are downloaded.
func RootFS(tb lab.TB, source string) string {
	tb.Helper()
	for _, tool := range []string{"apt-get", "dpkg-deb"} {
		if _, err := exec.LookPath(tool); err != nil {
			lab.SkipOrFail(tb, fmt.Errorf("%w, which makes the image", err))
		}
	}
	dir, err := MakeRootFS(source)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	return dir
}

// MakeRootFS is RootFS for programs that are no tests.
func MakeRootFS(source string) (string, error) {
	sum := sha256.New()
	for _, script := range image.Scripts(source) {
		text, err := os.ReadFile(script)
		if err != nil {
			return "", err
		}
		_, _ = sum.Write(text)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	base := filepath.Join(cache, "tandem", fmt.Sprintf("image-%s-%.6x", runtime.GOARCH, sum.Sum(nil)))
	if _, err := os.Stat(base); err == nil {
		return base, nil
	}
	if err := os.MkdirAll(filepath.Dir(base), 0o755); err != nil {
		return "", err
	}
	temp, err := os.MkdirTemp(filepath.Dir(base), "image-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temp)
	if err := image.RootFS(source, filepath.Join(temp, "root"), runtime.GOARCH); err != nil {
		return "", err
	}
	err = os.Rename(filepath.Join(temp, "root"), base)
	if errors.Is(err, syscall.ENOTEMPTY) || errors.Is(err, fs.ErrExist) {
		err = nil // another run was faster
	}
	return base, err
}

// Build builds the programs of the upper layer into a directory, which becomes /usr/local/bin, with
// further flags of go build.
func Build(tb lab.TB, source, dir string, flags ...string) {
	tb.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		lab.SkipOrFail(tb, fmt.Errorf("%w, which makes the image", err))
	}
	if err := image.BuildPrograms(source, dir, runtime.GOARCH, flags...); err != nil {
		tb.Fatalf("%v", err)
	}
}
