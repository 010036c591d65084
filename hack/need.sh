#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: need.sh <command or file>=<Debian package>...
#
# Sees to it that commands and files are there: as root on Debian and its relatives
# the packages of missing ones are installed, elsewhere they are named.
set -euo pipefail

present() { if [[ $1 == /* ]]; then [[ -e $1 ]]; else command -v "$1" >/dev/null; fi; }

missing=() packages=()
for pair in "$@"; do
	if ! present "${pair%=*}"; then
		missing+=("${pair%=*}")
		packages+=("${pair#*=}")
	fi
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
	echo "Installing ${packages[*]}, for: ${missing[*]}" >&2
	export DEBIAN_FRONTEND=noninteractive
	{ apt-get update && apt-get install -y --no-install-recommends "${packages[@]}"; } </dev/null >&2 && exit 0
fi
echo "Missing: ${missing[*]}" >&2
echo "On Debian: apt-get install ${packages[*]}" >&2
exit 1
