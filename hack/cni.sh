#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: cni.sh
#
# Builds the daemons of flannel and kube-router, beside which the tests of test/cluster run, and prints the directory
# they are in: one below the user's cache, which is made only once for each pair of versions. Flannel's needs a C compiler.
#
#	TANDEM_CNI=$(hack/cni.sh) make test-cluster
#
# These are the newest releases all of whose sources the module proxy has.
set -euo pipefail
cd "$(dirname "$0")/.."

flannel=v0.27.4 kube_router=v2.1.0
hack/need.sh gcc=gcc /usr/include/stdlib.h=libc6-dev ipset=ipset || exit 1

cached=${XDG_CACHE_HOME:-$HOME/.cache}/tandem/cni-$flannel-$kube_router
export GOWORK=off GOFLAGS=-mod=mod
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# build <program> <module> <version> <package>: in a module of its own.
build() {
	[[ ! -x $cached/$1 ]] || return 0
	echo "Building $1 $3, which takes a minute or two" >&2
	mkdir "$scratch/$1"
	(
		cd "$scratch/$1"
		go mod init cni 2>/dev/null
		go mod edit -require="$2@$3"
		nice go build -trimpath -buildvcs=false -ldflags='-s -w' -o "../built-$1" "$4" >&2
	)
	mkdir -p "$cached"
	mv "$scratch/built-$1" "$cached/$1"
}

CGO_ENABLED=1 build flanneld github.com/flannel-io/flannel $flannel github.com/flannel-io/flannel
CGO_ENABLED=0 build kube-router github.com/cloudnativelabs/kube-router/v2 $kube_router github.com/cloudnativelabs/kube-router/v2/cmd/kube-router
echo "$cached"
