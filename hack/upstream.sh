#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: upstream.sh [-tracer|-kubeadm|-e2e|-agnhost|-regression-issue-74839] [<output>]
#
# Builds Kubernetes' own kube-proxy, which benchmarks put beside ours, and prints where
# it is: <output>, or a file below the user's cache, which is built only once. The tools
# that it runs are seen to as well.
#
#	UPSTREAM_KUBE_PROXY=$(hack/upstream.sh) make bench BENCH=CRR
#
# With -tracer it builds the unit tests of upstream's iptables mode instead, with a test
# of test/differential that answers questions about the rules. That takes seconds where
# kube-proxy was built before.
#
#	UPSTREAM_TRACER=$(hack/upstream.sh -tracer) go test ./proxier/iptables -run TestDifferential
#
# With -kubeadm it builds that release's kubeadm, with which the test of test/install upgrades; with
# -e2e upstream's end-to-end tests; with -agnhost and -regression-issue-74839 what their pods run.
#
# The release is that of k8s.io/component-base in go.mod, or the newest before it with
# the same minor number whose sources the module proxy has. KUBERNETES_VERSION=v1.36.4
# takes that one and no other.
set -euo pipefail
what=kube-proxy
case ${1:-} in -tracer | -kubeadm | -e2e | -agnhost | -regression-issue-74839) what=${1#-} && shift ;; esac
output=${1:+$(realpath -m "$1")}
cd "$(dirname "$0")/.."

[[ $what != kube-proxy ]] || hack/need.sh iptables-restore=iptables nft=nftables || echo "It is built, but will not run here." >&2

wanted=${KUBERNETES_VERSION:-$(sed -n 's/^\tk8s.io\/component-base v0\./v1./p' go.mod)}
[[ $wanted =~ ^v1\.[0-9]+\.[0-9]+$ ]] || { echo "upstream.sh: $wanted is not a release" >&2 && exit 1; }

questions=$PWD/test/differential/testdata/tracer/tracer_test.go
# A module of its own: upstream must not get into ours, not even as a tool.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
export GOWORK=off GOFLAGS=-mod=mod CGO_ENABLED=0

release= # what go mod download says of one; it fails for one without sources
field() { sed -n "s/^\t\"$1\": \"\(.*\)\",\?$/\1/p" <<<"$release"; }

version=$wanted
until release=$(go mod download -json "k8s.io/kubernetes@$version"); do
	field Error >&2
	patch=${version##*.}
	[[ -z ${KUBERNETES_VERSION:-} && $patch != 0 ]] || exit 1
	version=${version%.*}.$((patch - 1))
done
[[ $version == "$wanted" ]] || echo "There are no sources of $wanted; this is $version." >&2

cache=${XDG_CACHE_HOME:-$HOME/.cache}/tandem
cached=$cache/$what-$version
[[ $what != tracer ]] || cached+=-$(sha256sum "$questions" | head -c 12)
: "${output:=$cached}"

# Upstream's own go.mod is of use in its repository alone: the modules that live there have
# no version in it.
module() {
	go mod init upstream 2>/dev/null
	go mod edit -go="$(sed -n 's/^go //p' "$(field GoMod)")" -require="k8s.io/kubernetes@$version"
	sed -n 's/^\t\(k8s\.io\/[a-z-]*\) v0\.0\.0$/\1/p' "$(field GoMod)" | while read -r staging; do
		go mod edit -replace="$staging=$staging@v0${version#v1}"
	done
}

build_program() {
	echo "Building $what $version, which takes some minutes" >&2
	local v=k8s.io/component-base/version major minor build=(go build) package=cmd/$what
	IFS=. read -r major minor _ <<<"${version#v}"
	case $what in
	e2e) build=(go test -c -vet=off) package=test/e2e ;;
	agnhost | regression-issue-74839) package=test/images/$what ;;
	esac
	nice "${build[@]}" -trimpath -buildvcs=false -o built \
		-ldflags="-s -w -X $v.gitVersion=$version -X $v.gitMajor=$major -X $v.gitMinor=$minor -X $v.gitTreeState=archive" \
		"k8s.io/kubernetes/$package" >&2
}

# The tests of a package can only be built with the files that are in its folder. So this is
# a folder of links to upstream's files, and one more.
build_tracer() {
	echo "Building the tests of iptables mode of $version" >&2
	local folder
	for folder in kubernetes kubernetes/pkg kubernetes/pkg/proxy kubernetes/pkg/proxy/iptables; do
		rm -f "$folder" # a link that the last round made
		mkdir "$folder"
		ln -s "$(field Dir)${folder#kubernetes}"/* "$folder"
	done
	ln -s "$questions" kubernetes/pkg/proxy/iptables/tandem_tracer_test.go
	go mod edit -replace=k8s.io/kubernetes=./kubernetes
	nice go test -c -vet=off -trimpath -buildvcs=false -ldflags="-s -w" -o built k8s.io/kubernetes/pkg/proxy/iptables >&2
}

if [[ $output != "$cached" || ! -x $cached ]]; then
	module
	if [[ $what == tracer ]]; then build_tracer; else build_program; fi
	mkdir -p "$(dirname "$output")"
	mv built "$output"
fi
echo "$output"
