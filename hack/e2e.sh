#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: e2e.sh
#
# Makes what Kubernetes' own end-to-end tests need, for TestE2E of test/install, and prints the directory
# it is in: one below the user's cache, which is made only once for each release.
#
#	bin/   the tests, and what their pods run
#	root/  the file system of those pods, from Debian's packages
set -euo pipefail
cd "$(dirname "$0")/.."
[[ -e /usr/share/keyrings/debian-archive-keyring.gpg ]] && command -v apt-get >/dev/null ||
	{ echo "e2e.sh: missing: apt-get and debian-archive-keyring, to download Debian's packages" >&2 && exit 1; }

# Commands of the tests are run in pods, by these tools.
packages=(base-files bash dash coreutils libc-bin netbase grep sed curl wget netcat-openbsd iproute2 bind9-dnsutils socat hostname)

version=$(sed -n 's/^\tk8s.io\/kubernetes \(v[0-9.]*\).*/\1/p' test/install/go.mod)
cached=${XDG_CACHE_HOME:-$HOME/.cache}/tandem/e2e-$version-$(cat hack/e2e.sh deploy/image/debs.sh | sha256sum | cut -c1-12)
if [[ ! -d $cached ]]; then
	mkdir -p "$(dirname "$cached")"
	scratch=$(mktemp -d -p "$(dirname "$cached")")
	trap 'rm -rf "$scratch"' EXIT
	mkdir "$scratch/bin" "$scratch/root"
	export KUBERNETES_VERSION=$version
	for program in agnhost regression-issue-74839; do hack/upstream.sh -$program "$scratch/bin/$program" >&2; done
	hack/upstream.sh -e2e "$scratch/bin/e2e.test" >&2
	echo "Unpacking Debian's packages" >&2
	deploy/image/debs.sh "$scratch/debs" "$(dpkg --print-architecture)" "${packages[@]}" >&2
	for deb in "$scratch"/debs/*.deb; do dpkg-deb -x "$deb" "$scratch/root"; done
	# What scripts of the packages would have made.
	[[ -e $scratch/root/usr/bin/nc ]] || ln -s nc.openbsd "$scratch/root/usr/bin/nc"
	# With which agnhost serves HTTPS.
	module=$(cd test/install && GOWORK=off go list -m -f '{{.Dir}}' k8s.io/kubernetes)
	cp "$module"/test/images/agnhost/porter/localhost.{crt,key} "$scratch/root/"
	chmod 644 "$scratch"/root/localhost.{crt,key}
	echo root:x:0:0:root:/root:/bin/bash >"$scratch/root/etc/passwd"
	echo root:x:0: >"$scratch/root/etc/group"
	rm -rf "$scratch"/debs "$scratch"/root/usr/share/{doc,man,locale,info,zoneinfo}
	chmod 755 "$scratch"
	mv "$scratch" "$cached"
	trap - EXIT
fi
echo "$cached"
