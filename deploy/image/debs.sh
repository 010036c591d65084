#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: debs.sh <directory> <architecture> <package>...
#
# Downloads Debian's packages and their dependencies into a directory. It ignores what is
# installed, and changes nothing on the machine: lists and apt's state are separate. The
# architecture can be any (amd64, arm64, …; Go's names).
#
# DEBIAN_SUITE and DEBIAN_MIRROR select the packages.
set -euo pipefail
to=$1 arch=$2
shift 2
suite=${DEBIAN_SUITE:-trixie} mirror=${DEBIAN_MIRROR:-http://deb.debian.org}
case $arch in
arm) arch=armhf ;;
386) arch=i386 ;;
ppc64le) arch=ppc64el ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists,cache/archives}/partial "$work"/none "$to"
: >"$work/status" # nothing is installed, so everything that is needed is fetched
signed=[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]
cat >"$work/sources.list" <<EOF
deb $signed $mirror/debian $suite main
deb $signed $mirror/debian-security $suite-security main
EOF
cat >"$work/apt.conf" <<EOF
APT::Architecture "$arch";
APT::Architectures { "$arch"; };
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
Dir::State "$work";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
Dir::Etc::sourcelist "$work/sources.list";
Dir::Etc::sourceparts "$work/none";
Dir::Etc::preferencesparts "$work/none";
EOF
export APT_CONFIG=$work/apt.conf
apt-get -qq update
apt-get -qq -y install --download-only "$@"
mv "$work"/cache/archives/*.deb "$to"
