#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: kernels.sh [-json] [<package>...]
#
# Runs the tests that need root, or those of the packages given, under other kernels, each
# package in a virtual machine of its own, and prints a table, or what go test -json
# would. KERNEL says which kernels, all that there are if empty; TESTFLAGS goes to the tests
# (-test.run=TestScenarios), TIMEOUT is how long those of one package may take (40m).
set -euo pipefail
cd "$(dirname "$0")/.."

json=
[[ ${1:-} != -json ]] || { json=1 && shift; }
kernels=${KERNEL:-5.10 6.1 6.12 newest}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export CGO_ENABLED=0
hack/vmrun.sh "$scratch/vmrun"
[[ $json ]] || go build -trimpath -o "$scratch/testsummary" ./hack/testsummary
test2json=$(go tool -n test2json)
root=$PWD

if [[ $# == 0 ]]; then
	mapfile -t packages < <(hack/privileged.sh | grep -vE '/test/(vm|image)$') # these make machines, and an image, with what a guest does not have
else
	mapfile -t packages < <(go list "$@")
fi
# As make build builds, so that what it compiled is not compiled again.
for p in "${packages[@]}"; do
	go test -c -trimpath -o "$scratch/${p//\//_}.test" "$p"
done

# Whoever is root should have everything, as elsewhere.
export TANDEM_REQUIRE_PRIVILEGED=1
# The kernels have all modules.
export TANDEM_REQUIRE_MODULES=1
options=(-memory 2048)
if [[ -n ${UPSTREAM_KUBE_PROXY:-} ]]; then
	options+=(-file "$UPSTREAM_KUBE_PROXY" -env "UPSTREAM_KUBE_PROXY=$UPSTREAM_KUBE_PROXY")
fi
module=$(go list -m)
status=0
run() {
	local kernel p
	for kernel in $kernels; do
		for p in "${packages[@]}"; do
			cd "$root/${p#"$module"}"
			# Emulated, all of it takes several times as long.
			"$test2json" -t -p "$p@$kernel" "$scratch/vmrun" -kernel "$kernel" "${options[@]}" -- \
				"$scratch/${p//\//_}.test" -test.v=test2json -test.timeout="${TIMEOUT:-40m}" ${TESTFLAGS:-} || status=1
		done
	done
	return $status
}
if [[ $json ]]; then run; else run | "$scratch/testsummary"; fi
