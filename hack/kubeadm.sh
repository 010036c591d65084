#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: kubeadm.sh
#
# Makes what nodes of a kubeadm cluster consist of, for the test of test/install, and prints the
# directory it is in: one below the user's cache, which is made only once for each state of the
# versions.
#
#	bin/   Kubernetes' programs, etcd, CoreDNS, pause and helm, and kubeadm-upgrade, of a later release
#	root/  a node's file system, with containerd and runc, from Debian's packages
set -euo pipefail
cd "$(dirname "$0")/.."
[[ -e /usr/share/keyrings/debian-archive-keyring.gpg ]] && command -v apt-get >/dev/null ||
	{ echo "kubeadm.sh: missing: apt-get and debian-archive-keyring, to download Debian's packages" >&2 && exit 1; }

# containerd runs runc, which a wrapper in node.sh may change with jq. kubeadm and kubelet want the rest.
packages=(base-files bash dash coreutils util-linux mount libc-bin netbase containerd runc containernetworking-plugins jq
	iptables nftables iproute2 conntrack socat ethtool kmod procps findutils grep sed)
inputs=(hack/kubeadm.sh deploy/image/debs.sh test/install/go.mod test/install/{coredns,pause}/main.go test/install/coredns/go.mod)

plane=$(hack/controlplane.sh)
later=$(hack/upstream.sh -kubeadm)
version=$(sed -n 's/^\tk8s.io\/kubernetes \(v[0-9.]*\).*/\1/p' test/install/go.mod)
helm=$(sed -n 's/^\thelm.sh\/helm\/v4 \(v[0-9.]*\).*/\1/p' test/deploy/go.mod)
cached=${XDG_CACHE_HOME:-$HOME/.cache}/tandem/kubeadm-$version-$({ cat "${inputs[@]}" && echo "$plane" "$helm" "$later"; } | sha256sum | cut -c1-12)
if [[ ! -d $cached ]]; then
	mkdir -p "$(dirname "$cached")"
	scratch=$(mktemp -d -p "$(dirname "$cached")")
	trap 'rm -rf "$scratch"' EXIT
	started=$SECONDS
	echo "Building kubelet, kubeadm, kubectl, kube-scheduler and kube-proxy $version, CoreDNS and helm, which takes ten minutes of CPU time" >&2
	export GOWORK=off CGO_ENABLED=0
	build() { nice go build -trimpath -buildvcs=false -o "$scratch/bin/" "$@" >&2; }
	mkdir "$scratch/bin" "$scratch/root"
	v=k8s.io/component-base/version
	IFS=. read -r major minor _ <<<"${version#v}"
	(cd test/install && build -ldflags="-s -w -X $v.gitVersion=$version -X $v.gitMajor=$major -X $v.gitMinor=$minor -X $v.gitTreeState=archive" tool)
	(cd test/install && build -ldflags='-s -w' ./pause)
	(cd test/install/coredns && build -ldflags='-s -w' .)
	(cd test/deploy && build -ldflags='-s -w' tool)
	cp "$plane"/* "$scratch/bin/"
	cp "$later" "$scratch/bin/kubeadm-upgrade"
	echo "Unpacking Debian's packages" >&2
	deploy/image/debs.sh "$scratch/debs" "$(dpkg --print-architecture)" "${packages[@]}" >&2
	for deb in "$scratch"/debs/*.deb; do dpkg-deb -x "$deb" "$scratch/root"; done
	# What scripts of the packages would have made.
	for tool in {ip,ip6}tables{,-save,-restore}; do ln -s "${tool/tables/tables-nft}" "$scratch/root/usr/sbin/$tool"; done
	echo root:x:0:0:root:/root:/bin/bash >"$scratch/root/etc/passwd"
	echo root:x:0: >"$scratch/root/etc/group"
	rm -rf "$scratch"/debs "$scratch"/root/usr/share/{doc,man,locale,info,zoneinfo}
	chmod 755 "$scratch"
	mv "$scratch" "$cached"
	trap - EXIT
	echo "Built in $((SECONDS - started)) s" >&2
fi
echo "$cached"
