#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: vmrun.sh [<output>]
#
# Sees to what virtual machines need, and builds the program that runs them.
set -euo pipefail
cd "$(dirname "$0")/.."

[[ $(uname -m) == x86_64 ]] || { echo "Kernels are run on x86_64 alone." >&2 && exit 1; }
hack/need.sh qemu-system-x86_64=qemu-system-x86 xz=xz-utils \
	/usr/share/keyrings/debian-archive-keyring.gpg=debian-archive-keyring
[[ -z ${1:-} ]] || CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o "$1" ./test/vm/vmrun
