#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Prints the packages whose tests need root: those that play in the lab or ask who
# they are. A package is here with all its tests, so that each runs once.
set -euo pipefail
cd "$(dirname "$0")/.."

module=$(go list -m)
needs_root=$(grep -rlE '/test/lab"|Gete?uid\(\)|\bNewT\(' --include='*_test.go' . |
	xargs -r dirname | sort -u | sed "s|^\.|$module|")
comm -12 <(go list ./... | sort) <(sort <<<"$needs_root")
