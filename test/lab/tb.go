// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// RequireEnv makes tests fail instead of skip when something they need is missing,
// for machines where everything ought to be there.
const RequireEnv = "TANDEM_REQUIRE_PRIVILEGED"

// TB is the part of testing.TB the lab uses. It is spelled out so that a demo
// does not link the testing package.
type TB interface {
	Helper()
	Skipf(format string, args ...any)
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
	Logf(format string, args ...any)
	Failed() bool
	Cleanup(func())
	Context() context.Context
}

// NewT opens a lab for a test and closes it at its end. Where labs are not possible
// the test is skipped with the reason, or fails if RequireEnv is set to 1.
func NewT(tb TB, opts ...Options) *Lab {
	tb.Helper()
	var o Options
	if len(opts) > 0 {
		o = opts[0]
	}
	if err := errors.Join(Available(), o.Nodes.Available()); err != nil {
		SkipOrFail(tb, err)
	}
	l, err := New(o)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	l.fail = func(err error) {
		tb.Helper()
		tb.Fatalf("%v", err)
	}
	tb.Cleanup(func() {
		if err := l.Close(); err != nil {
			tb.Errorf("%v", err)
		}
	})
	return l
}

// SkipOrFail ends a test that lacks something: skipped, or failed if RequireEnv is
// set to 1.
func SkipOrFail(tb TB, missing error) {
	tb.Helper()
	skipOrFail(tb, RequireEnv, missing)
}

// RequireModulesEnv says that the kernel has every module that distributions have, IPVS and
// SCTP among them, as those of test/vm do.
const RequireModulesEnv = "TANDEM_REQUIRE_MODULES"

// SkipOrFailModule ends a test that lacks what is in a module of the kernel: skipped, or
// failed if RequireModulesEnv is set to 1.
func SkipOrFailModule(tb TB, missing error) {
	tb.Helper()
	skipOrFail(tb, RequireModulesEnv, missing)
}

// SkipUnnamed ends a test that lacks a program which a variable of the environment names. It
// is skipped, and says so on standard error as well, as nothing else is printed of a
// benchmark, where nobody named one; where one was named that does not run, it fails if
// everything ought to be there.
func SkipUnnamed(tb TB, env string, missing error) {
	tb.Helper()
	if os.Getenv(env) != "" {
		SkipOrFail(tb, missing)
	}
	fmt.Fprintln(os.Stderr, "Skipped:", missing)
	tb.Skipf("missing: %v", missing)
}

func skipOrFail(tb TB, env string, missing error) {
	tb.Helper()
	if os.Getenv(env) == "1" {
		tb.Fatalf("missing, although %s=1: %v", env, missing)
	}
	tb.Skipf("missing: %v", missing)
}
