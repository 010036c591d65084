// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"runtime/debug"
	"strings"

	componentversion "k8s.io/component-base/version"
)

// version is set by make build and by the build of the image.
var version = ""

type versionInfo struct {
	Version   string `json:"version"`
	Revision  string `json:"revision"`
	GoVersion string `json:"goVersion"`
}

// buildVersion is what the linker set, or else what the Go tool recorded.
func buildVersion() versionInfo {
	stamp := componentversion.Get()
	v := versionInfo{Version: version, Revision: "unknown revision", GoVersion: stamp.GoVersion}
	dirty := stamp.GitTreeState == "dirty"
	if !strings.Contains(stamp.GitCommit, "$Format") {
		v.Revision = stamp.GitCommit
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	v.Version = cmp.Or(v.Version, info.Main.Version)
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.modified":
			dirty = s.Value == "true"
		}
	}
	if dirty {
		v.Revision += "+dirty"
	}
	return v
}
