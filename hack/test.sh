#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: test.sh [unit] [privileged]
#
# Runs the packages whose tests need no root, those with tests that do, or both, and
# summarises. TESTFLAGS goes to go test.
set -euo pipefail
cd "$(dirname "$0")/.."

race=-race
if ! hack/need.sh gcc=gcc /usr/include/stdlib.h=libc6-dev; then
	echo "No C compiler, so the race detector stays off." >&2
	race=
fi
# Some tests look at the machine from outside, with the tools an operator has.
hack/need.sh ip=iproute2 iptables-restore=iptables || echo "The tests that run them will fail or be skipped." >&2
# One boots another kernel.
hack/vmrun.sh || echo "It will fail or be skipped." >&2

privileged=$(hack/privileged.sh)
unit=$(comm -23 <(go list ./... | sort) <(sort <<<"$privileged"))

if [[ $(id -u) == 0 ]]; then
	# Whoever is root should have everything: what is missing then is a failure.
	export TANDEM_REQUIRE_PRIVILEGED=${TANDEM_REQUIRE_PRIVILEGED:-1}
elif [[ " $* " == *" privileged "* ]]; then
	echo "Not root: tests that need network namespaces, cgroups or BPF are skipped (sudo -E make test runs them)." >&2
fi

gotest() {
	[[ -z $1 ]] || CGO_ENABLED=${race:+1} go test -json $race -timeout=20m ${TESTFLAGS:-} "${@:2}" $1
}

run() {
	local status=0 set
	for set in "$@"; do
		case $set in
		unit) gotest "$unit" || status=1 ;;
		# One at a time: they load the kernel, and measure it.
		privileged) gotest "$privileged" -p=1 || status=1 ;;
		*) echo "unknown set of tests: $set" >&2 && return 2 ;;
		esac
	done
	return $status
}

summary=$(mktemp)
trap 'rm -f "$summary"' EXIT
CGO_ENABLED=0 go build -trimpath -o "$summary" ./hack/testsummary
# With pipefail, so that tests that could not even be started are noticed as well.
run "$@" | "$summary"
