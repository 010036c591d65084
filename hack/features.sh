#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Writes docs/kernels.md: what each kernel can do for the proxy, and what the programs
# cost there. KERNEL says which kernels, all that there are if empty.
set -euo pipefail
cd "$(dirname "$0")/.."

kernels=${KERNEL:-5.10 6.1 6.12 newest}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export CGO_ENABLED=0
hack/vmrun.sh "$scratch/vmrun"
go build -trimpath -ldflags='-s -w' -o "$scratch/" ./cmd/tandemctl
go build -trimpath -o "$scratch/featuretable" ./hack/featuretable
go test -c -trimpath -o "$scratch/ebpf.test" ./proxier/ebpf

for k in $kernels; do
	# Features of a module are missing until it is loaded.
	"$scratch/vmrun" -kernel "$k" -file "$scratch/tandemctl" -- sh -c "
		modprobe -a sch_ingress cls_bpf udp_diag nf_conntrack nf_nat nf_tables nft_compat nft_chain_nat ip_tables ip6_tables iptable_nat ip6table_nat ip_vs_rr ip_set
		exec '$scratch/tandemctl' capabilities -o json" >"$scratch/$k.json"
	# Sizes that are not recorded, or differ, are no failure here.
	(cd proxier/ebpf && "$scratch/vmrun" -kernel "$k" -file "$scratch/ebpf.test" -- \
		sh -c "modprobe nf_conntrack; exec '$scratch/ebpf.test' -test.v -test.run='^TestProgramSizes$'") >"$scratch/$k.sizes" || true
done
# shellcheck disable=SC2086
"$scratch/featuretable" "$scratch" $kernels >docs/kernels.md
