// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package kernel tells tests what the kernel they run under can do, so that they can
// be run under any.
package kernel

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/test/lab"
)

var probed = sync.OnceValue(func() capabilities.Report {
	return capabilities.Probe(context.Background(), capabilities.Options{})
})

// Report is all that is known of it.
func Report() capabilities.Report { return probed() }

// Has tells whether the kernel has a feature.
func Has(f capabilities.Feature) bool { return probed().Has(f) }

// Needs skips a test on a kernel that lacks a feature. Tests of package capabilities hold
// what is found against the versions that have it.
func Needs(tb lab.TB, features ...capabilities.Feature) {
	tb.Helper()
	if err := lab.Root(); err != nil {
		lab.SkipOrFail(tb, err) // nobody else is told what the kernel can do
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

// programs is what they need that came last.
const programs = capabilities.GlobalPointers

// HasPrograms tells whether the kernel can carry them, and with them mode ebpf.
func HasPrograms() bool { return Has(programs) }

// NeedsPrograms skips a test of what only programs do where the kernel cannot carry them.
func NeedsPrograms(tb lab.TB) {
	tb.Helper()
	Needs(tb, programs)
}

// Rounds is how often a test should do something that proves more the more often it is done: a
// tenth in short mode.
func Rounds(n int) int {
	if testing.Short() {
		return max(1, n/10)
	}
	return n
}

// Dealt says whether the part of tests that this kernel was dealt has a play, counted from 0. All
// have all of them but where hack/kernels.sh has several kernels share them: TANDEM_PART=1/4.
func Dealt(play int) bool {
	part, parts := 0, 1
	if text := os.Getenv("TANDEM_PART"); text != "" {
		if _, err := fmt.Sscanf(text, "%d/%d", &part, &parts); err != nil || parts < 1 {
			panic(fmt.Sprintf("TANDEM_PART=%s is no part like 1/4", text))
		}
	}
	return (play+play/parts)%parts == part // not every fourth, where plays alternate
}

// AtLeast compares its version. What capabilities knows as a feature is asked for as that.
func AtLeast(tb lab.TB, major, minor int) bool {
	tb.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		tb.Fatalf("uname: %v", err)
	}
	release := unix.ByteSliceToString(u.Release[:])
	var haveMajor, haveMinor int
	if _, err := fmt.Sscanf(release, "%d.%d", &haveMajor, &haveMinor); err != nil {
		tb.Fatalf("release %q: %v", release, err)
	}
	return haveMajor > major || haveMajor == major && haveMinor >= minor
}

// Since skips a test of what came with a version.
func Since(tb lab.TB, major, minor int, what string) {
	tb.Helper()
	if !AtLeast(tb, major, minor) {
		tb.Skipf("missing: %s, which Linux %d.%d has", what, major, minor)
	}
}
