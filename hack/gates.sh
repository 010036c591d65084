#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: gates.sh [<release>]
#
# Writes config/gates.txt: the feature gates that Kubernetes' own kube-proxy knows, by
# asking the registry that it links. The release is v1.<minor>.1 of k8s.io/component-base
# in go.mod, or the one that is named.
set -euo pipefail
cd "$(dirname "$0")/.."
release=${1:-$(sed -n 's/^\tk8s.io\/component-base v0\.\([0-9]*\)\..*/v1.\1.1/p' go.mod)}
[[ $release =~ ^v1\.[0-9]+\.[0-9]+$ ]] || { echo "gates.sh: $release is not a release" >&2 && exit 1; }
output=$PWD/config/gates.txt

# A module of its own: upstream must not get into ours, not even as a tool.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
export GOWORK=off GOFLAGS=-mod=mod CGO_ENABLED=0
mod=$(go mod download -json "k8s.io/kubernetes@$release" | sed -n 's/^\t"GoMod": "\(.*\)",\?$/\1/p')
go mod init gates 2>/dev/null
go mod edit -go="$(sed -n 's/^go //p' "$mod")" -require="k8s.io/kubernetes@$release"
sed -n 's/^\t\(k8s\.io\/[a-z-]*\) v0\.0\.0$/\1/p' "$mod" | while read -r staging; do
	go mod edit -replace="$staging=$staging@v0${release#v1}"
done
cat >main.go <<'GO'
package main

import (
	"fmt"
	"slices"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
	_ "k8s.io/kubernetes/cmd/kube-proxy/app"
)

func main() {
	gate := utilfeature.DefaultMutableFeatureGate
	specs, needs := gate.GetAll(), gate.Dependencies()
	var names []featuregate.Feature
	for name := range specs {
		if name != "AllAlpha" && name != "AllBeta" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		spec := specs[name]
		stage := string(spec.PreRelease)
		if stage == "" {
			stage = "GA"
		}
		fmt.Print(name, " ", stage, " ", spec.Default)
		if spec.LockToDefault {
			fmt.Print(" locked")
		}
		slices.Sort(needs[name])
		for _, other := range needs[name] {
			fmt.Print(" ", other)
		}
		fmt.Println()
	}
}
GO
{
	echo "# The feature gates of kube-proxy $release, of which most mean something to other"
	echo "# components alone: name, stage, default, whether that is locked, gates that have to"
	echo "# be on with it. hack/gates.sh writes this file."
	nice go run .
} >gates.txt
mv gates.txt "$output"
echo "$output: $(grep -vc '^#' "$output") feature gates" >&2
