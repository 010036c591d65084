#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: gates.sh [<release>...]
#
# Writes config/gates.txt: the feature gates that Kubernetes' own kube-proxy knows, by
# asking the registries that it links. The first release is the one whose gates are ours:
# v1.<minor>.<patch> of k8s.io/component-base in go.mod. The others are the newest of
# the three minor versions before it that the module proxy has.
set -euo pipefail
cd "$(dirname "$0")/.."
output=$PWD/config/gates.txt

# A module of its own: upstream must not get into ours, not even as a tool.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export GOWORK=off GOFLAGS=-mod=mod CGO_ENABLED=0
if (($# == 0)); then
	ours=$(sed -n 's/^\tk8s.io\/component-base v0\.\([0-9.]*\)$/v1.\1/p' go.mod)
	minor=${ours#v1.} && minor=${minor%.*}
	cd "$scratch" && go mod init newest 2>/dev/null
	set -- "$ours"
	for back in 1 2 3; do
		set -- "$@" "$(go list -m -f '{{.Version}}' "k8s.io/kubernetes@v1.$((minor - back))")"
	done
fi
for release; do
	[[ $release =~ ^v1\.[0-9]+\.[0-9]+$ ]] || { echo "gates.sh: $release is not a release" >&2 && exit 1; }
	mkdir "$scratch/$release" && cd "$scratch/$release"
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
	"log"
	"slices"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/kubernetes/LINKED"
)

func main() {
	gate := utilfeature.DefaultMutableFeatureGate
	if err := logsapi.AddFeatureGates(gate); err != nil {
		log.Fatal(err)
	}
	specs := gate.GetAll()
	needs := map[featuregate.Feature][]featuregate.Feature{}
	if of, ok := any(gate).(interface {
		Dependencies() map[featuregate.Feature][]featuregate.Feature
	}); ok { // since 1.35
		needs = of.Dependencies()
	}
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
	# All that kube-proxy links takes minutes to build. For older releases, the package with
	# nearly all gates is enough: what it lacks, the first release has.
	linked=pkg/features
	[[ $release != "$1" ]] || linked=cmd/kube-proxy/app
	sed -i "s#LINKED#$linked#" main.go
	nice go run . | LC_ALL=C sort >"$scratch/$release.txt"
done

# A gate of an older release alone is accepted and has no effect, and a lock counts if all
# releases have it: a configuration that one of them accepts must not end this proxy.
{
	echo "# The feature gates of kube-proxy $1, of which most mean something to other"
	echo "# components alone: name, stage, default, whether that is locked, gates that have to"
	echo "# be on with it. REMOVED gates are of older releases: name and last minor version."
	echo "# From ${*}; hack/gates.sh writes this file."
	cd "$scratch"
	awk '
		FNR == 1 { file++ }
		{ locked = ($4 == "locked") }
		file == 1 { line[$1] = $0; name[++n] = $1; lock[$1] = locked; next }
		$1 in lock { if (!locked) lock[$1] = 0; next }
		!($1 in removed) {
			minor = FILENAME
			sub(/^v/, "", minor); sub(/\.[0-9]+\.txt$/, "", minor)
			removed[$1] = minor; name[++n] = $1
			line[$1] = $1 " REMOVED " minor
		}
		END {
			for (i = 1; i <= n; i++) {
				text = line[name[i]]
				if (!lock[name[i]]) sub(/ locked/, "", text)
				print text
			}
		}
	' "${@/%/.txt}" | LC_ALL=C sort
} >"$scratch/gates.txt"
mv "$scratch/gates.txt" "$output"
echo "$output: $(grep -vc '^#' "$output") feature gates" >&2
