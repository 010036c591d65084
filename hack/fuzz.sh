#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: fuzz.sh <fuzztime>
#
# Runs each fuzz target for the given time; go test takes one at a time. An input that
# fails stays below testdata/fuzz of its package, to be committed with the fix.
set -euo pipefail
cd "$(dirname "$0")/.."

status=0
while IFS=: read -r file name; do
	echo "== $name in $(dirname "$file")"
	go test -run='^$' -fuzz="^$name\$" -fuzztime="$1" "$(dirname "$file")" </dev/null || status=1
done < <(grep -roE '^func Fuzz[A-Za-z0-9_]*' --include='*_test.go' . | sed 's/func //' | sort)
exit $status
