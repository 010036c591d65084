#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: bench.sh <benchtime>
#
# Runs the benchmarks of all packages that have some, one package at a time. BENCH
# selects by name, BENCHFLAGS goes to go test (-count=10 for benchstat). The module that
# has a control plane is left out; docs/testing.md says how its benchmark is run.
set -euo pipefail
cd "$(dirname "$0")/.."

# Built as make build does, so that what it compiled is not compiled again.
export CGO_ENABLED=0
grep -rlE '^func Benchmark' --include='*_test.go' --exclude-dir=cluster . | xargs -r dirname | sort -u |
	xargs -r go test -trimpath -run='^$' -bench="${BENCH:-.}" -benchmem -benchtime="$1" -p=1 -timeout=30m ${BENCHFLAGS:-}
