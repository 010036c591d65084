// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package kernel tells tests what the kernel they run under can do, so that they can
// be run under any.
package kernel

import (
	"context"
	"fmt"
	"sync"

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

// Since skips a test of what came with a version, where capabilities knows no feature
// for it.
func Since(tb lab.TB, major, minor int, what string) {
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
	if haveMajor < major || haveMajor == major && haveMinor < minor {
		tb.Skipf("missing: %s, which Linux %d.%d has", what, major, minor)
	}
}
