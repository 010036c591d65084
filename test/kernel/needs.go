// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package kernel tells tests which features the running kernel has, so that they can run under
// any kernel.
package kernel

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/test/lab"
)

// AsLinux names an older version, as 5.15, whose features the running kernel is assumed to have; empty for its
// own. That stands in for kernels that no package registry has: what the verifier of that version accepts is
// not tested.
func AsLinux() string { return os.Getenv("TANDEM_AS_LINUX") }

// Mask is for the flag --ebpf-capability-mask of a kube-proxy that a test starts; it may be empty.
func Mask() string {
	if AsLinux() == "" {
		return ""
	}
	return "linux=" + AsLinux()
}

var probed = sync.OnceValue(func() capabilities.Report {
	mask, err := capabilities.ParseMask(Mask())
	if err != nil {
		panic(fmt.Sprintf("TANDEM_AS_LINUX: %v", err))
	}
	// Any proxy's rules load it. Without it, a machine that has just started could not tell what it offers to programs.
	_ = exec.Command("modprobe", "nf_conntrack").Run()
	return capabilities.Probe(context.Background(), capabilities.Options{Mask: mask})
})

// Report returns all known features of the kernel.
func Report() capabilities.Report { return probed() }

// Has reports whether the kernel has a feature.
func Has(f capabilities.Feature) bool { return probed().Has(f) }

// Needs skips a test on a kernel that lacks a feature. Tests of package capabilities compare
// the detected features with kernel versions.
func Needs(tb lab.TB, features ...capabilities.Feature) {
	tb.Helper()
	if err := lab.Root(); err != nil {
		lab.SkipOrFail(tb, err) // probing features needs root
	}
	for _, f := range features {
		result, _ := probed().Lookup(f)
		switch info, _ := capabilities.Describe(f); result.State {
		case capabilities.No:
			tb.Skipf("missing: %s (%s), which Linux %s has", f, info.Description, info.Since)
		case capabilities.Inconclusive:
			tb.Fatalf("probe %s: %v", f, result.Err)
		}
	}
}

// programs is the newest feature that the programs need.
const programs = capabilities.GlobalPointers

// HasPrograms reports whether the kernel supports the eBPF programs, and so mode ebpf.
func HasPrograms() bool { return Has(programs) }

// NeedsPrograms skips a test of the eBPF programs if the kernel does not support them.
func NeedsPrograms(tb lab.TB) {
	tb.Helper()
	Needs(tb, programs)
}

// Rounds scales the number of rounds of a random or repeated test: a tenth in short mode.
func Rounds(n int) int {
	if testing.Short() {
		return max(1, n/10)
	}
	return n
}

// IsPart reports whether plays are divided among several kernels, or commits.
func IsPart() bool {
	_, parts := part()
	return parts > 1
}

// Dealt reports whether this kernel runs a play, given its number from 0. Each kernel runs all of
// them, unless hack/kernels.sh divides them among several kernels: TANDEM_PART=1/4.
func Dealt(play int) bool {
	part, parts := part()
	return (play+play/parts)%parts == part // not every fourth, where plays alternate
}

func part() (part, parts int) {
	text := os.Getenv("TANDEM_PART")
	if text == "" {
		return 0, 1
	}
	if _, err := fmt.Sscanf(text, "%d/%d", &part, &parts); err != nil || parts < 1 {
		panic(fmt.Sprintf("TANDEM_PART=%s is no part like 1/4", text))
	}
	return part, parts
}

// Version returns the kernel's, like 6.12.
func Version(tb lab.TB) string {
	tb.Helper()
	major, minor := version(tb)
	return fmt.Sprintf("%d.%d", major, minor)
}

// AtLeast compares the kernel's version. Use Has for features that package capabilities knows.
func AtLeast(tb lab.TB, major, minor int) bool {
	tb.Helper()
	haveMajor, haveMinor := version(tb)
	return haveMajor > major || haveMajor == major && haveMinor >= minor
}

func version(tb lab.TB) (major, minor int) {
	tb.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		tb.Fatalf("uname: %v", err)
	}
	release := unix.ByteSliceToString(u.Release[:])
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		tb.Fatalf("release %q: %v", release, err)
	}
	return major, minor
}

// Since skips a test on kernels older than a version.
func Since(tb lab.TB, major, minor int, what string) {
	tb.Helper()
	if !AtLeast(tb, major, minor) {
		tb.Skipf("missing: %s, which Linux %d.%d has", what, major, minor)
	}
}
