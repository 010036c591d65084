// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/tandem-proxy/tandem/test/lab"
)

// AssetsEnv names the directory with the programs of a control plane. It is the usual variable
// for this purpose (envtest).
const AssetsEnv = "KUBEBUILDER_ASSETS"

// assets are the paths of these programs.
type assets struct{ etcd, apiServer, controllerManager string }

// findAssets returns the programs, or an error that says how to get them.
func findAssets() (a assets, err error) {
	dir := os.Getenv(AssetsEnv)
	if dir == "" {
		return a, fmt.Errorf("%s is not set: it has to be the directory of kube-apiserver, kube-controller-manager and etcd, which hack/controlplane.sh builds and prints", AssetsEnv)
	}
	for name, path := range map[string]*string{"etcd": &a.etcd, "kube-apiserver": &a.apiServer, "kube-controller-manager": &a.controllerManager} {
		*path = filepath.Join(dir, name)
		if _, err := exec.LookPath(*path); err != nil {
			return a, fmt.Errorf("run a control plane: %w", err)
		}
	}
	return a, nil
}

// assetsT is findAssets for a test, which is skipped or fails without them.
func assetsT(tb lab.TB) assets {
	tb.Helper()
	a, err := findAssets()
	if err != nil {
		lab.SkipUnnamed(tb, AssetsEnv, err)
	}
	return a
}
