// SPDX-License-Identifier: Apache-2.0

package main

import "runtime/debug"

// version is set by the build of a release: -ldflags "-X main.version=v1.2.3".
var version = ""

type versionInfo struct {
	Version   string `json:"version"`
	Revision  string `json:"revision"`
	GoVersion string `json:"goVersion"`
}

func buildVersion() versionInfo {
	v := versionInfo{Version: version, Revision: "unknown revision"}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	v.GoVersion = info.GoVersion
	if v.Version == "" {
		v.Version = info.Main.Version
	}
	dirty := false
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
