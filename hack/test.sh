#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: test.sh [unit] [privileged] [kernel] [cluster]
#
# Runs the packages whose tests need no root, those with tests that do, under another
# kernel those that need IPVS or SCTP, and those of the module that has a control plane, and
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
# Others boot another kernel.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
vmrun=$scratch/vmrun
hack/vmrun.sh "$vmrun" || echo "What needs another kernel will fail or be skipped." >&2

privileged=$(hack/privileged.sh)
unit=$(comm -23 <(go list ./... | sort) <(sort <<<"$privileged"))
# Modules of their own, whose libraries the product is not to depend on.
modules=(test/deploy)

if [[ $(id -u) == 0 ]]; then
	# Whoever is root should have everything: what is missing then is a failure.
	export TANDEM_REQUIRE_PRIVILEGED=${TANDEM_REQUIRE_PRIVILEGED:-1}
elif [[ " $* " == *" privileged "* || " $* " == *" cluster "* ]]; then
	echo "Not root: tests that need network namespaces, cgroups or BPF are skipped (sudo -E make test runs them)." >&2
fi

gotest() {
	[[ -z $1 ]] || CGO_ENABLED=${race:+1} go test -json $race -timeout=30m ${TESTFLAGS:-} "${@:2}" $1
}

# What no test proves under a kernel without IPVS and SCTP. Why there is no such machine,
# if there is none, the tests of test/vm say.
kernel=6.1
kerneltest() {
	"$vmrun" -kernel "$kernel" -- true || return 0
	local status=0
	KERNEL=$kernel TESTFLAGS= hack/kernels.sh -json ./proxier/ipvs || status=1
	KERNEL=$kernel TESTFLAGS='-test.run=^(TestMixed|TestSCTP|TestIPVS|TestPacketCounters|TestRulePackets|TestKernel)$|^TestScenarios$/^s80|^(TestHealthChecks|TestInitOnly|TestReady)$/^ipvs$' \
		hack/kernels.sh -json ./proxier/iptables/integration ./test/e2e ./test/lab ./kernel/nfacct || status=1
	return $status
}

# The module is vetted here, as make verify does not need all of Kubernetes. It is built as
# the control plane was, so that nothing is compiled twice: without the race detector.
cluster() (
	KUBEBUILDER_ASSETS=$(hack/controlplane.sh) || return
	export KUBEBUILDER_ASSETS GOWORK=off CGO_ENABLED=0
	cd test/cluster
	go mod tidy -diff >&2 && go vet -trimpath ./... >&2 || return
	go test -json -trimpath -timeout=20m ${TESTFLAGS:-} ./...
)

run() {
	local status=0 set
	for set in "$@"; do
		case $set in
		unit)
			gotest "$unit" || status=1
			# Never from the cache, which knows no files of other modules.
			for module in "${modules[@]}"; do (cd "$module" && race= && gotest ./... -count=1) || status=1; done
			;;
		# One at a time: they load the kernel, and measure it.
		privileged) gotest "$privileged" -p=1 || status=1 ;;
		kernel) kerneltest || status=1 ;;
		cluster) cluster || status=1 ;;
		*) echo "unknown set of tests: $set" >&2 && return 2 ;;
		esac
	done
	return $status
}

summary=$scratch/testsummary
CGO_ENABLED=0 go build -trimpath -o "$summary" ./hack/testsummary
# With pipefail, so that tests that could not even be started are noticed as well.
run "$@" | "$summary"
