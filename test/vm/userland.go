// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
)

// userlandSuite is the suite of the guest's tools, for all kernels: tools are part of the
// proxy's image, not of the node.
const userlandSuite = "bookworm"

// userlandPackages are the programs of tests, and of people who inspect a machine.
var userlandPackages = []string{
	"iptables", "ipset", "ipvsadm", "nftables", "conntrack", "iproute2", "ethtool", "iputils-ping", "wireguard-tools",
	// busybox is for modprobe and commands that no other package has. Its shell prefers its own
	// commands to those above, so there is another shell.
	"busybox-static", "dash", "bash", "procps",
	"apparmor", // the parser of profiles, which a kernel with AppArmor loads
	// For test binaries with the race detector.
	"libc6", "libgcc-s1",
}

// userlandWithout are paths that programs do not need.
var userlandWithout = []string{
	"usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian", "usr/share/bug", "usr/share/perl",
	"usr/share/zoneinfo", "usr/share/bash-completion", "usr/lib/x86_64-linux-gnu/gconv", "usr/lib/x86_64-linux-gnu/perl", "usr/lib/locale",
	"usr/lib/systemd", "var",
}

// userlandLinks are links that scripts of packages would create. Both variants of iptables
// are also available by their own names.
var userlandLinks = [][2]string{
	{"bin", "usr/bin"}, {"sbin", "usr/sbin"}, {"lib", "usr/lib"}, {"lib64", "usr/lib64"},
	{"usr/bin/sh", "dash"},
	{"usr/sbin/modprobe", "/usr/bin/busybox"},
	{"usr/sbin/iptables", "iptables-nft"}, {"usr/sbin/iptables-save", "iptables-nft-save"}, {"usr/sbin/iptables-restore", "iptables-nft-restore"},
	{"usr/sbin/ip6tables", "ip6tables-nft"}, {"usr/sbin/ip6tables-save", "ip6tables-nft-save"}, {"usr/sbin/ip6tables-restore", "ip6tables-nft-restore"},
	{"etc/mtab", "/proc/self/mounts"},
}

var userlandTexts = [][2]string{
	{"etc/passwd", "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"},
	{"etc/group", "root:x:0:\nnogroup:x:65534:\n"},
	{"etc/hosts", "127.0.0.1 localhost vm\n::1 localhost\n"},
	{"etc/hostname", "vm\n"},
	{"etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\nprotocols: files\nservices: files\n"},
}

// userlandVersion changes with what the guest's root directory consists of.
func userlandVersion() string {
	sum := sha256.Sum256(fmt.Append(nil, userlandSuite, userlandPackages, userlandWithout, userlandLinks, userlandTexts))
	return hex.EncodeToString(sum[:4])
}

// buildUserland writes the guest's root directory.
func buildUserland(ctx context.Context, w io.Writer) (err error) {
	state, err := newAPT(ctx, userlandSuite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, state.close()) }()
	debs, err := state.closure(ctx, userlandPackages...)
	if err != nil {
		return err
	}
	a := newArchive(w)
	for _, dir := range []string{"dev", "proc", "sys", "run", "root", "tmp", "var/log", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64"} {
		if err := a.dir(dir, 0o755); err != nil {
			return err
		}
	}
	for _, l := range userlandLinks {
		if err := a.link(l[0], l[1]); err != nil {
			return err
		}
	}
	for _, t := range userlandTexts {
		if err := a.text(t[0], t[1]); err != nil {
			return err
		}
	}
	for _, f := range []string{"var/run", "var/lock"} {
		if err := a.link(f, "/run"); err != nil {
			return err
		}
	}
	// The kernel opens it before there is a /dev.
	if err := a.device("dev/console", 5, 1); err != nil {
		return err
	}
	for _, deb := range debs {
		if err := unpack(ctx, deb, func(r io.Reader) error { return a.tar(r, wantedFile) }); err != nil {
			return err
		}
	}
	return a.close()
}

func wantedFile(name string) bool {
	for _, l := range userlandLinks {
		if name == l[0] {
			return false
		}
	}
	for _, p := range userlandWithout {
		if name == p || strings.HasPrefix(name, p+"/") {
			return false
		}
	}
	return true
}

// tar writes the files of a tar archive that are wanted, at their merged places.
func (a *archive) tar(r io.Reader, wanted func(name string) bool) error {
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		name := merged(h.Name)
		if name == "." || !wanted(name) {
			continue
		}
		perm := h.FileInfo().Mode().Perm()
		switch h.Typeflag {
		case tar.TypeDir:
			err = a.dir(name, perm)
		case tar.TypeReg:
			err = a.file(name, perm, h.Size, in)
		case tar.TypeSymlink:
			err = a.link(name, h.Linkname)
		case tar.TypeLink:
			err = a.link(name, "/"+merged(h.Linkname))
		default:
			err = fmt.Errorf("%s is of type %q", name, h.Typeflag)
		}
		if err != nil {
			return err
		}
	}
}

// merged is where a path of a package is with a merged /usr.
func merged(name string) string {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	if name == "" {
		return "."
	}
	switch top, _, _ := strings.Cut(name, "/"); top {
	case "bin", "sbin", "lib", "lib64":
		return "usr/" + name
	}
	return name
}
