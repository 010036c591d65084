// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"io"
	"runtime/debug"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/component-base/version"
	"k8s.io/component-base/version/verflag"
)

func addVersionFlag(fs *pflag.FlagSet) { verflag.AddFlags(fs) }

// printVersion answers --version. The values are upstream's; the name is ours,
// as our version says nothing about Kubernetes'.
func printVersion(w io.Writer, fs *pflag.FlagSet) (printed bool, err error) {
	switch fs.Lookup("version").Value.String() {
	case "true":
		_, err = fmt.Fprintf(w, "Tandem %s (kube-proxy of Kubernetes %s)\n", buildVersion(), version.DefaultKubeBinaryVersion)
		return true, err
	case "raw":
		_, err = fmt.Fprintf(w, "%#v\n", version.Get())
		return true, err
	}
	return false, nil
}

// buildVersion is what the linker set, or else what the Go tool recorded.
func buildVersion() string {
	text := version.Get().GitVersion
	if !strings.Contains(text, "$Format") {
		return text
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	revision, modified := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = "-modified"
		}
	}
	if revision == "" {
		return info.Main.Version
	}
	return "devel-" + revision + modified
}
