#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: test.sh <stage>...
#
#	check       vet of all packages, and the tests that need no root
#	namespaces  the packages whose tests need root, two at a time
#	demo        what make demo shows
#	full        all packages, with all rounds
#	race        all packages, short, with the race detector
#	kernels     what needs root, under other kernels
#	cluster     with a real control plane, a module of its own
#	kubeadm     the commands of docs/install.md on a kubeadm cluster, a module of its own
#	e2e         Kubernetes' own end-to-end tests on a kubeadm cluster, likewise
#
# Runs the stages, shows how far they are, and summarises. check and namespaces are the short
# ones: one scenario for each statement, and a tenth of the rounds of what is random. TESTFLAGS
# goes to go test.
set -euo pipefail
cd "$(dirname "$0")/.."

has() { [[ " $stages " == *" $1 "* ]]; }
stages=$*
root=
[[ $(id -u) != 0 ]] || root=1
# As make build builds, so that no dependency is compiled twice. Only the race detector, whose
# dependencies are compiled anew, needs cgo.
export CGO_ENABLED=0 GOFLAGS="-trimpath -buildvcs=false ${GOFLAGS:-}"

if has check || has namespaces || has full || has race; then
	# Some tests look at the machine from outside, with the tools an operator has.
	hack/need.sh ip=iproute2 iptables-restore=iptables flock=util-linux jq=jq || echo "The tests that run them will fail or be skipped." >&2
fi
if [[ $root ]]; then
	# As root, everything must be available: missing tools are failures.
	export TANDEM_REQUIRE_PRIVILEGED=${TANDEM_REQUIRE_PRIVILEGED:-1}
elif has namespaces || has full || has race || has cluster || has kubeadm || has e2e; then
	echo "Not root: tests that need network namespaces, cgroups or BPF are skipped (sudo -E make test runs them)." >&2
fi

# Where upstream's kube-proxy is, its unit tests are built in seconds.
if [[ -n ${UPSTREAM_KUBE_PROXY:-} && -z ${UPSTREAM_TRACER:-} ]]; then
	UPSTREAM_TRACER=$(hack/upstream.sh -tracer) || echo "Tests beside upstream's iptables proxier will be skipped." >&2
	export UPSTREAM_TRACER
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if has full || has race || has kernels; then
	hack/vmrun.sh "$scratch/vmrun" || echo "Tests that need another kernel will fail or be skipped." >&2
fi
packages=$(go list ./...)
privileged=$(hack/privileged.sh)
unit=$(comm -23 <(sort <<<"$packages") <(sort <<<"$privileged"))
only=$(hack/privileged.sh -only)
some=$(comm -23 <(sort <<<"$packages") <(sort <<<"$only"))

# Over so many commits one after the other, what is slow and repeats what others prove is spread: scenarios on upstream's
# kube-proxy, and tests under other kernels.
export COMMITS=${COMMITS:-8}
commit=$(git rev-list --count HEAD 2>/dev/null || echo 0)
part=$((commit % COMMITS))/$COMMITS
# Tests that need root, of which make test has run a short version, and scenarios, of which it has played one for each
# statement, are spread over half as many commits.
turns=$((COMMITS > 1 ? COMMITS / 2 : 1))
share=$((commit % turns))/$turns

# chosen reports whether TESTFLAGS chooses tests.
chosen() { [[ " ${TESTFLAGS:-}" == *" -run"* ]]; }

# turn prints, as -run=..., the tests of these packages that have their turn, one in $turns; nothing for all of them.
# Tests that play scenarios and profiles run always, and play the part that TANDEM_PART says.
turn() { # <offset> <package>...
	((turns > 1)) && ! chosen || return 0
	local plays='^Test(Compatibility|Coexistence|Profiles|Scenarios|ShadowScenarios|TakeOver)$'
	go list -f '{{$d := .Dir}}{{range .TestGoFiles}}{{$d}}/{{.}}{{"\n"}}{{end}}{{range .XTestGoFiles}}{{$d}}/{{.}}{{"\n"}}{{end}}' "${@:2}" |
		xargs sed -nE 's/^func ((Test|Fuzz|Example)[A-Za-z0-9_]*)\(.*/\1/p' | sort -u |
		awk -v part=$(((commit + $1) % turns)) -v parts=$turns -v plays="$plays" \
			'$0 ~ plays || NR % parts == part { list = list "|" $0 }
			END { print "-run=^(" substr(list, 2) ")$" }'
}

# Test binaries link in half the time without debug information, which these runs do not use.
gotest() { go test -json -ldflags='-s -w' ${TESTFLAGS:-} "$@"; }

# Skips tests that need root, even for root: the namespaces stage runs their packages in full.
# Packages in which nearly all tests need root are only vetted.
check() {
	local status=0
	go vet $only >&2 || status=1
	TANDEM_WITHOUT_ROOT=1 TANDEM_REQUIRE_PRIVILEGED= gotest -vet=all -short -timeout=5m $some || status=1
	return $status
}

# Two at a time: most of them wait most of the time, for timers of the kernel and for processes.
namespaces() { [[ ! $root ]] || gotest -short -timeout=20m -p=2 $privileged; }

demo() {
	[[ $root ]] || return 0
	as_test "$(go list -m)/test/demo" Demo make --silent --no-print-directory demo
}

full() {
	local status=0 run
	gotest -timeout=30m $unit || status=1
	local dealt='/(cmd/tandemctl|test/upstream)$' as515='/(proxier/ebpf|proxier/iptables/integration|test/hosts)$'
	# The namespaces stage plays all there is of test/image.
	local done='/test/image$'
	run=$(turn 0 $privileged)
	TANDEM_PART=$share gotest -timeout=30m -p=1 $run $(grep -vE "$dealt|$as515|$done" <<<"$privileged") || status=1
	# One in four times as under Linux 5.15, which no machine here can run. Over time each test has its turn so.
	local as=
	((commit / turns % 4 != 3)) || as=5.15
	TANDEM_AS_LINUX=$as TANDEM_PART=$share gotest -timeout=30m -p=1 $run $(grep -E "$as515" <<<"$privileged") || status=1
	# Scenarios beside two modes of upstream's.
	local modes=$((COMMITS > 1 ? 2 * COMMITS : 1))
	TANDEM_PART=$((commit % modes))/$modes gotest -timeout=30m $run ./cmd/tandemctl || status=1
	# Each scenario with each pair of proxies: 40 minutes in all.
	local plays=$((COMMITS > 1 ? 8 * COMMITS : 1))
	if chosen; then
		TANDEM_PART=$part gotest -timeout=30m ./test/upstream || status=1
	else
		TANDEM_PART=$part gotest -timeout=30m $run -skip='^TestCoexistence$' ./test/upstream || status=1
		TANDEM_PART=$((commit % plays))/$plays gotest -timeout=30m -run='^TestCoexistence$' ./test/upstream || status=1
	fi
	return $status
}

# Short ones, as it makes them five times as long. It sees nothing of programs that a test starts, and
# finds nothing where one goroutine asks a simulation.
race() {
	hack/need.sh gcc=gcc /usr/include/stdlib.h=libc6-dev || {
		echo "No C compiler, so nothing runs with the race detector." >&2
		return 0
	}
	local status=0 inprocess
	local -x CGO_ENABLED=1
	inprocess=$(grep -vE '/test/(container|crr|e2e|hosts|image|rules|upstream)$' <<<"$privileged")
	local alone='^Test(Oracle|OracleFinds|Differential|DifferentialFinds|DifferentialLarge|SizeOfDeletions|SizeOfChanges|Death)$'
	gotest -race -short -timeout=10m -skip="$alone" $unit || status=1
	# The tests that do not have their turn in the full stage.
	TANDEM_PART=$part gotest -race -short -timeout=20m -p=1 $(turn 1 $inprocess) $inprocess || status=1
	return $status
}

kernels() {
	"$scratch/vmrun" -kernel 6.1 -- true || return 0 # why not, the tests of test/vm say
	local status=0 job jobs=()
	local -x SLOTS=$scratch/slots
	mkdir "$SLOTS"
	# IPVS of upstream's kube-proxy beside this one, by turns. Of tandemctl shadow one or two scenarios, of which each takes a
	# minute there.
	if [[ -n ${UPSTREAM_KUBE_PROXY:-} ]]; then
		case $((commit % 4)) in
		0) TESTFLAGS='-test.run=^TestShares$/^ipvs' KERNEL=6.12 hack/kernels.sh -json ./test/e2e & ;;
		1) TESTFLAGS='-test.run=^TestShadowScenarios$/^ipvs$' TANDEM_PART=$((commit / 4 % 100))/100 KERNEL=6.12 hack/kernels.sh -json ./cmd/tandemctl & ;;
		2) TESTFLAGS='-test.run=^TestSharedUnderLoad$/^ipvs' KERNEL=6.12 hack/kernels.sh -json ./test/e2e & ;;
		3) TANDEM_PART=$((commit / 4 % COMMITS))/$COMMITS KERNEL=6.12 TESTFLAGS='-test.short -test.run=^(TestTakeOver|TestRollBack|TestShadow)$/^ipvs|^TestTakeOver$/./^ipvs' \
			hack/kernels.sh -json ./test/e2e ./cmd/tandemctl & ;;
		esac
		jobs+=($!)
	fi
	# Otherwise the full stage plays beside that one, under this kernel.
	local -x UPSTREAM_KUBE_PROXY=
	# What nothing else proves: IPVS and SCTP, with all rounds, and a part of the scenarios.
	TANDEM_PART=$part KERNEL=6.1 TESTFLAGS= hack/kernels.sh -json ./proxier/ipvs &
	jobs+=($!)
	KERNEL=6.1 TESTFLAGS='-test.run=^(TestMixed|TestSCTP|TestIPVS|TestPacketCounters|TestRulePackets|TestKernel)$|^TestScenarios$/^s80|^(TestHealthChecks|TestInitOnly|TestReady)$/^ipvs$' \
		hack/kernels.sh -json ./proxier/iptables/integration ./test/e2e ./test/lab ./kernel/nfacct &
	jobs+=($!)
	# Pods of the image in mode ipvs, and under AppArmor, by turns.
	if ((commit % COMMITS == COMMITS / 4)); then
		KERNEL=6.12 TESTFLAGS='-test.short -test.run=^TestChart$/^(ipvs|.*AppArmor)$' hack/kernels.sh -json ./test/image &
		jobs+=($!)
	fi
	# What this kernel proves as well is spread over commits.
	COMMITS=$((2 * COMMITS)) TESTFLAGS="-test.short ${TESTFLAGS:-}" hack/kernels.sh -json &
	jobs+=($!)
	trap 'kill "${jobs[@]}" 2>/dev/null; wait; exit 130' INT TERM # jobs ignore what a terminal sends
	for job in "${jobs[@]}"; do
		wait "$job" || status=1
	done
	trap - INT TERM
	return $status
}

# The module is vetted here, as make verify does not need all of Kubernetes.
cluster() (
	KUBEBUILDER_ASSETS=$(hack/controlplane.sh) || return
	export KUBEBUILDER_ASSETS GOWORK=off
	# Without the module proxy, the tests beside these daemons are skipped, and say so.
	if TANDEM_CNI=$(hack/cni.sh); then export TANDEM_CNI; fi
	cd test/cluster
	go mod tidy -diff >&2 && go vet ./... >&2 || return
	go test -json -timeout=20m ${TESTFLAGS:-} ./...
)

kubeadm() (
	TANDEM_KUBEADM=$(hack/kubeadm.sh) || return
	export TANDEM_KUBEADM GOWORK=off
	cd test/install
	(cd coredns && go mod tidy -diff >&2 && go vet ./... >&2) || return
	go mod tidy -diff >&2 && go vet ./... >&2 || return
	go test -json -count=1 -timeout=30m -skip='^TestE2E$' ${TESTFLAGS:-} .
)

e2e() (
	TANDEM_KUBEADM=$(hack/kubeadm.sh) && TANDEM_E2E=$(hack/e2e.sh) || return
	export TANDEM_KUBEADM TANDEM_E2E GOWORK=off
	cd test/install
	go vet ./... >&2 && go test -json -count=1 -timeout=150m -run='^TestE2E$' ${TESTFLAGS:-} .
)

# as_test runs a command as go test -json would show a test.
as_test() { # <package> <test> <command>...
	local package=$1 test=$2 status=0 start=$SECONDS
	printf '{"Action":"run","Package":"%s","Test":"%s"}\n' "$package" "$test"
	"${@:3}" >"$scratch/said" 2>&1 </dev/null || status=1
	go tool test2json -p "$package" cat "$scratch/said" | sed -n "s/\"Action\":\"output\"/&,\"Test\":\"$test\"/p"
	local ended=pass
	[[ $status == 0 ]] || ended=fail
	printf '{"Action":"%s","Package":"%s","Test":"%s"}\n' $ended "$package" "$test"
	printf '{"Action":"%s","Package":"%s","Elapsed":%d}\n' $ended "$package" $((SECONDS - start))
	return $status
}

# count says how many packages a stage has; those of kernels are counted as they come.
count() {
	case $1 in
	check) wc -w <<<"$some" ;;
	namespaces) if [[ $root ]]; then wc -w <<<"$privileged"; else echo 0; fi ;;
	demo) if [[ $root ]]; then echo 1; else echo 0; fi ;;
	full | race) wc -w <<<"$packages" ;;
	*) echo 1 ;;
	esac
}

run() {
	local status=0 stage
	for stage in $stages; do
		echo "== $stage"
		$stage || status=1
	done
	return $status
}

total=0
for stage in $stages; do
	[[ $(type -t "$stage") == function ]] || { echo "unknown stage: $stage" >&2 && exit 2; }
	total=$((total + $(count "$stage")))
done
brief=
[[ $stages != check ]] || brief=-brief
go build -o "$scratch/testsummary" ./hack/testsummary
# With pipefail, so that tests that could not even be started are noticed as well.
run | "$scratch/testsummary" -packages $total $brief
