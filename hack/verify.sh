#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks everything about the sources that needs no test, and goes on after a failed
# check, so that one run shows them all.
set -uo pipefail
cd "$(dirname "$0")/.."

status=0
check() { # <what> <command>...
	local out
	if out=$("${@:2}" 2>&1); then
		printf 'ok    %s\n' "$1"
	else
		printf 'FAIL  %s\n' "$1"
		[[ -z $out ]] || sed 's/^/      /' <<<"$out"
		status=1
	fi
}

# For commands that list what is wrong, and succeed: a silent one passes.
silent() {
	local out
	out=$("$@" 2>&1)
	[[ -z $out ]] || { echo "$out" && return 1; }
}

# Lists source files without build output. It does not use git, which may be missing or
# may not trust the owner of the checkout.
sources() { # <pattern>...
	local args=() p
	for p in "$@"; do args+=(-o -name "$p"); done
	find . \( -name .git -o -path ./bin -o -path ./.cache \) -prune -o -type f \( "${args[@]:1}" \) -print | sort
}

format() { sources '*.go' | xargs gofmt -l; }

clang_format() { sources '*.c' '*.h' | xargs clang-format-19 --dry-run -Werror; }

tidy() { go mod tidy -diff && (cd test/hosts/plugins && GOWORK=off go mod tidy -diff); }

# Run at a fixed version, so that it is in no go.mod.
staticcheck=honnef.co/go/tools/cmd/staticcheck@v0.8.2
staticcheck() { CGO_ENABLED=0 GOFLAGS=-trimpath go run $staticcheck ./...; }

# What may import what.
layers() { CGO_ENABLED=0 go test -trimpath -count=1 ./hack/layers; }

# A module of its own. Those of test/cluster and test/install are looked at where they are built.
deploy() (cd test/deploy && export CGO_ENABLED=0 GOWORK=off && go mod tidy -diff && go test -trimpath -vet=all -count=1 ./...)

# Compared by content and not with git, so that it also works before a commit. They are the same
# in every checkout (TestForwardDeclarations).
generated() {
	local before after
	before=$(checksums)
	make --silent --no-print-directory generate || return # with the paths that the compiler needs
	after=$(checksums)
	[[ $after != "$before" ]] || return 0
	echo "generated files were stale; they are fresh now, commit them:"
	diff <(echo "$before") <(echo "$after") | awk '/^>/ {print $3}'
	echo "made by $(clang-19 --version | head -n 1)"
	return 1
}
checksums() { sources '*_bpfe[lb].go' '*_bpfe[lb].o' enums.go | xargs sha256sum; }

# Generated files tell who made them in the first line instead.
spdx() {
	local f
	while read -r f; do
		head -n 3 "$f" | grep -qE 'SPDX-License-Identifier: |^// Code generated .* DO NOT EDIT\.$' || echo "$f: no SPDX-License-Identifier in the first lines"
	done < <(sources '*.go' '*.c' '*.h' '*.sh' Makefile run)
	for f in bpf/*.[ch]; do
		grep -qE 'SPDX-License-Identifier: \(?GPL-2.0-only OR BSD-2-Clause\)?' "$f" || echo "$f: must be GPL-2.0-only OR BSD-2-Clause"
	done
}

# Every licence named in a header has its text, and modules that go into the binaries
# have one that allows it.
licences() {
	local id module dir text
	cmp LICENSE LICENSES/Apache-2.0.txt
	while read -r id; do
		[[ -s LICENSES/$id.txt ]] || echo "LICENSES/$id.txt is missing"
	done < <(sources '*.go' '*.c' '*.h' '*.sh' Makefile run | xargs sed -nE 's/^.{0,3}SPDX-License-Identifier: \(?([A-Za-z0-9. -]*[A-Za-z0-9]).*/\1/p' |
		sed 's/ OR /\n/g' | sort -u)
	while read -r module dir; do
		text=$(cat "$dir"/LICEN[SC]E* "$dir"/COPYING* 2>/dev/null | tr -s '[:space:]' ' ')
		case $text in
		'') echo "$module: no licence file" ;;
		*'Apache License'* | *'Permission is hereby granted, free of charge'* | *'Redistribution and use in source and binary forms'* | *'Permission to use, copy, modify, and'*) ;;
		*) echo "$module: unknown licence, look at $dir" ;;
		esac
	done < <(go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}' ./... | sort -u)
}

check 'gofmt' silent format
if command -v clang-format-19 >/dev/null; then
	check 'clang-format' clang_format
else
	echo 'skip  clang-format (clang-format-19 is not installed)'
fi
# Built as make build does, so that what it compiled is not compiled again.
check 'go vet' env CGO_ENABLED=0 go vet -trimpath ./...
check 'staticcheck' staticcheck
check 'imports between layers' layers
check 'go mod tidy' tidy
check 'test/deploy' deploy
check 'generated files' generated
check 'SPDX headers' silent spdx
check 'licences' silent licences
exit $status
