#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: privileged.sh [-only]
#
# Prints the packages that have tests which need root: those that use the lab or check the user
# ID. With -only, prints the packages in which all tests need root, so that runs without root
# need not link them.
set -euo pipefail
cd "$(dirname "$0")/.."

module=$(go list -m)
needs_root=$(grep -rlE '/test/lab"|Gete?uid\(\)|\bNewT\(' --include='*_test.go' . |
	xargs -r dirname | sort -u | sed "s|^\.|$module|")
list=$(comm -12 <(go list ./... | sort) <(sort <<<"$needs_root"))
if [[ ${1:-} == -only ]]; then
	list=$(grep -xE "$module/(kernel/tc|observe/selfprobe|proxier/ebpf(/sockets)?|.*/integration|test/(container|crr|e2e|image|lab|rules|scenarios/live|upstream))" <<<"$list")
fi
echo "$list"
