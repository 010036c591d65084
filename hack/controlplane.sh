#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: controlplane.sh
#
# Builds kube-apiserver, kube-controller-manager and etcd, which the tests of test/cluster
# run, and prints the directory they are in: one below the user's cache, which is made
# only once for each state of that module's go.mod, where their versions are. Who has them
# already names the directory by KUBEBUILDER_ASSETS.
set -euo pipefail
cd "$(dirname "$0")/../test/cluster"

programs=(etcd kube-apiserver kube-controller-manager)
complete() { local p && for p in "${programs[@]}"; do [[ -x $1/$p ]] || return 1; done; }

if [[ -n ${KUBEBUILDER_ASSETS:-} ]]; then
	complete "$KUBEBUILDER_ASSETS" || { echo "controlplane.sh: $KUBEBUILDER_ASSETS does not have all of: ${programs[*]}" >&2 && exit 1; }
	echo "$KUBEBUILDER_ASSETS"
	exit
fi

export GOWORK=off CGO_ENABLED=0
version=$(sed -n 's/^\tk8s.io\/kubernetes \(v[0-9.]*\).*/\1/p' go.mod)
cached=${XDG_CACHE_HOME:-$HOME/.cache}/tandem/control-plane-$version-$(sha256sum go.mod | cut -c1-12)
if ! complete "$cached"; then
	scratch=$(mktemp -d)
	trap 'rm -rf "$scratch"' EXIT
	echo "Building etcd, kube-apiserver and kube-controller-manager $version, which takes ten minutes of CPU time" >&2
	started=$SECONDS
	v=k8s.io/component-base/version
	IFS=. read -r major minor _ <<<"${version#v}"
	# Everything that is not the name of a package is an error, or about downloads.
	nice go build -v -trimpath -buildvcs=false -o "$scratch/" \
		-ldflags="-s -w -X $v.gitVersion=$version -X $v.gitMajor=$major -X $v.gitMinor=$minor -X $v.gitTreeState=archive" tool 2>&1 |
		awk '/[ #]/ {print; fflush(); next} ++n % 250 == 0 {print n " packages are built"; fflush()}' >&2
	mv "$scratch/server" "$scratch/etcd" # after the package of its main
	mkdir -p "$cached"
	for p in "${programs[@]}"; do mv "$scratch/$p" "$cached/"; done
	echo "Built in $((SECONDS - started)) s" >&2
fi
echo "$cached"
