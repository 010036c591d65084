#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: kernels.sh [-json] [<package>...]
#
# Runs the tests that need root, or those of the packages given, under other kernels, each
# package in a virtual machine of its own, and prints a table, or what go test -json
# would. KERNEL says which kernels, all that there are if empty; TESTFLAGS goes to the tests
# (-test.run=TestScenarios), TIMEOUT is how long those of one package may take (40m).
# MACHINES run at a time, one for each CPU by default: each is emulated by one thread. Several
# of these scripts share them, and mix no lines of -json, if SLOTS names one directory.
#
# Several kernels share the tests of packages that take long: each test runs under one of those
# that can, and what asks most of a kernel under all. With each commit they are dealt anew; DEAL, a
# number, says how. COMMITS spreads them over so many commits, each of which has its part of
# them, and the other packages: with four kernels and COMMITS=4, each runs under one of them; with
# COMMITS=8, half of them do. With packages given, or FULL=1, all tests run under all kernels, with
# the part of their plays that TANDEM_PART says.
set -euo pipefail
cd "$(dirname "$0")/.."

json=
[[ ${1:-} != -json ]] || { json=1 && shift; }
kernels=${KERNEL:-5.10 6.1 6.12 newest}

scratch=$(mktemp -d)
# The machines end with this, each with all that it runs.
end() {
	local jobs job
	trap '' INT TERM
	jobs=$(jobs -rp)
	for job in $jobs; do kill -- "-$job" 2>/dev/null || true; done
	wait $jobs 2>/dev/null || true
	rm -rf "$scratch"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
export CGO_ENABLED=0
hack/vmrun.sh "$scratch/vmrun"
[[ $json ]] || go build -trimpath -o "$scratch/testsummary" ./hack/testsummary
test2json=$(go tool -n test2json)
root=$PWD

long='/(proxier/.*|test/(e2e|hosts))$'
dealt=
if [[ $# == 0 ]]; then
	[[ -n ${FULL:-} || $(wc -w <<<"$kernels") == 1 ]] || dealt=$long
	list=$(hack/privileged.sh | grep -vE '/test/(vm|image|container|demo)$') # these make machines, an image, containers and programs, which takes more than a guest has, and long
	# Those first, so that no CPU is idle in the end.
	mapfile -t packages < <(grep -E "$long" <<<"$list" && grep -vE "$long" <<<"$list")
else
	mapfile -t packages < <(go list "$@")
fi
# compile makes the test program of a package that has its turn, as make build and hack/test.sh build, so that what they
# compiled is not compiled again.
compile() {
	[[ -e $scratch/${1//\//_}.test ]] || go test -c -trimpath -ldflags='-s -w' -o "$scratch/${1//\//_}.test" "$1"
}

# As root, everything must be available, as in other stages.
export TANDEM_REQUIRE_PRIVILEGED=1
# The kernels have all modules.
export TANDEM_REQUIRE_MODULES=1
# The machines are emulated, each with one CPU.
export TANDEM_SLOWER=5
# Dealt or not, each kernel plays these.
everywhere='^Test(Scenarios|PacketScenes|ModelKernel|Process|Profiles)$'
# These ask a simulation, and no kernel; emulated, they take minutes.
simulated='^Test(Model|ModelFull|Oracle|OracleFinds|Death|SizeOfDeletions|MillionEndpoints)$'
options=(-memory 2048)
if [[ -n ${UPSTREAM_KUBE_PROXY:-} ]]; then
	options+=(-file "$UPSTREAM_KUBE_PROXY" -env "UPSTREAM_KUBE_PROXY=$UPSTREAM_KUBE_PROXY")
fi
if printf '%s\n' "${packages[@]}" | grep -q '/test/image$'; then
	layers=$(go run ./test/image/imagelayers "$scratch/image")
	options+=(-file "${layers%:*}" -file "${layers#*:}" -env "TANDEM_IMAGE_LAYERS=$layers")
fi
module=$(go list -m)
deal=${DEAL:-$(git rev-list --count HEAD 2>/dev/null || echo 0)}

# hand prints the pattern of the tests that a kernel is dealt, and what tells scenarios the same;
# nothing if it gets all. It fails if it gets none.
hand() {
	local kernel=$1 p=$2 players=$kernels number=0 k
	[[ -n $dealt && $p =~ $dealt ]] || return 0
	# 5.10 does not support the fast path and skips most of these: its share would not run anywhere.
	[[ ! $p =~ /(ebpf|e2e|hosts)$ ]] || players=${kernels//5.10/}
	[[ " $players " == *" $kernel "* ]] || players=$kernel
	for k in $players; do
		[[ $k != "$kernel" ]] || break
		number=$((number + 1))
	done
	set -- $players
	local parts=$(($# * ${COMMITS:-1}))
	(cd "$root/${p#"$module"}" && "$scratch/${p//\//_}.test" -test.list '^(Test|Fuzz)') |
		awk -v part=$(((number * ${COMMITS:-1} + deal) % parts)) -v parts=$parts -v everywhere="$everywhere" \
			'/^(Test|Fuzz)/ && (NR % parts == part || $0 ~ everywhere) { list = list "|" $0 }
			END { if (!list) exit 1; print "-test.run=^(" substr(list, 2) ")$ TANDEM_PART=" part "/" parts }'
}

# turn says whether a kernel runs any test of a package with this commit.
turn() { # <kernel> <package> <number of the package>
	local number=0 k
	[[ -n $dealt && ! $2 =~ $dealt ]] || return 0
	for k in $kernels; do
		[[ $k != "$1" ]] || break
		number=$((number + 1))
	done
	(((number + $3 + deal) % ${COMMITS:-1} == 0))
}

slots=${SLOTS:-$scratch}
# acquire waits until another machine may run. It may while the descriptor $slot is open.
acquire() {
	local i
	while :; do
		for ((i = 1; i <= ${MACHINES:-$(nproc)}; i++)); do
			exec {slot}>"$slots/slot$i"
			! flock -n "$slot" || return 0
			exec {slot}>&-
		done
		sleep 1
	done
}

# What one prints comes when it has ended, as lines of two would mix.
machine() {
	local kernel=$1 p=$2 tests=$3 out run part
	out=$(mktemp -p "$scratch")
	read -r run part <<<"$tests"
	part=${part:-${TANDEM_PART:+TANDEM_PART=$TANDEM_PART}}
	cd "$root/${p#"$module"}"
	"$test2json" -t -p "$p@$kernel" "$scratch/vmrun" -kernel "$kernel" "${options[@]}" ${part:+-env "$part"} -- \
		"$scratch/${p//\//_}.test" -test.v=test2json -test.timeout="${TIMEOUT:-40m}" -test.skip="$simulated" $run ${TESTFLAGS:-} >"$out" || touch "$scratch/failed"
	flock "$slots" cat "$out"
	rm "$out"
}
run() {
	local kernel p number=0 tests
	for p in "${packages[@]}"; do
		number=$((number + 1))
		for kernel in $kernels; do
			turn "$kernel" "$p" $number || continue
			compile "$p" || {
				touch "$scratch/failed"
				continue
			}
			tests=$(hand "$kernel" "$p") || continue
			acquire
			set -m # a process group of its own
			machine "$kernel" "$p" "$tests" &
			set +m
			exec {slot}>&-
		done
	done
	while [[ $(jobs -rp) ]]; do wait -n || true; done
}
if [[ $json ]]; then
	run
else
	exec {summary}> >("$scratch/testsummary")
	pid=$!
	run >&"$summary"
	exec {summary}>&-
	wait "$pid" || touch "$scratch/failed"
fi
[[ ! -e $scratch/failed ]]
