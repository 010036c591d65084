#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: rootfs.sh <directory> [<architecture>]
#
# Builds the image's file system except for Tandem's own programs: the tools that kube-proxy
# runs and their dependencies, from Debian's packages. It has no shell and no package manager.
# Packages are unpacked and nothing of them is run. So any machine with apt can build the file
# system of any architecture (amd64, arm64, …; Go's names).
#
# DEBIAN_SUITE and DEBIAN_MIRROR select the packages, which debs.sh downloads. With a mirror that
# keeps old versions, and SOURCE_DATE_EPOCH, the result is reproducible.
set -euo pipefail
root=$1 arch=${2:-$(dpkg --print-architecture)}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# kmod has modprobe, which the legacy iptables runs. nft removes the table of upstream's mode
# nftables. ipset is for operators who inspect a node in mode ipvs.
"$(dirname "$0")/debs.sh" "$work/debs" "$arch" iptables ipset nftables kmod ca-certificates base-files

mkdir -p "$root" "$work/all"
for deb in "$work"/debs/*.deb; do
	dpkg-deb -x "$deb" "$work/all"
	# Where scanners look for the packages of an image without dpkg.
	package=$(dpkg-deb -f "$deb" Package)
	install -D -m 644 <(dpkg-deb -f "$deb") "$root/var/lib/dpkg/status.d/$package"
done

cd "$work/all"
lib=$(basename "$(dirname usr/lib/*/libc.so.6)")
rm -rf "usr/lib/$lib"/{gconv,engines-3,ossl-modules}
keep=(
	etc/{debian_version,os-release,protocols,services}
	usr/bin/kmod usr/sbin/{modprobe,lsmod,ipset,nft} usr/sbin/*tables-{nft,legacy}*
	usr/sbin/xtables-{nft,legacy}-multi
	usr/lib/{os-release,"$lib",tmpfiles.d} usr/lib*/ld-*
	usr/share/{common-licenses,doc/*/copyright,iptables}
)
for path in "${keep[@]}"; do
	[[ ! -e $path && ! -L $path ]] || cp -a --parents "$path" "$root"
done
cd "$root"
for dir in bin sbin lib lib64; do [[ ! -e usr/$dir ]] || ln -s "usr/$dir" $dir; done
mkdir -p etc/ssl/certs usr/local/{bin,sbin} proc sys dev run lib/modules
mkdir -p -m 1777 tmp
find "$work/all/usr/share/ca-certificates" -name '*.crt' -print0 | sort -z | xargs -0 cat >etc/ssl/certs/ca-certificates.crt
echo 'root:x:0:0:root:/root:/sbin/nologin' >etc/passwd
echo 'root:x:0:' >etc/group
# The plain names run the variant that the node uses. They are in another directory than the
# names with a variant, because the wrapper searches that directory.
for tool in {ip,ip6}tables{,-save,-restore}; do ln -s ../bin/iptables-wrapper "usr/local/sbin/$tool"; done
# klipper-lb's program is called entry; kube-proxy is it by that name.
ln -s ../local/bin/kube-proxy usr/bin/entry
find . -newermt "@${SOURCE_DATE_EPOCH:-0}" -exec touch -h -d "@${SOURCE_DATE_EPOCH:-0}" {} +
