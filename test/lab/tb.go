// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// RequireEnv, if 1, makes tests fail instead of skip when something they need is missing,
// for machines that should have everything.
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

// RequireModulesEnv, if 1, says that the kernel has all modules of a distribution, including
// IPVS and SCTP, as the kernels of test/vm do.
const RequireModulesEnv = "TANDEM_REQUIRE_MODULES"

// SkipOrFailModule ends a test that lacks a kernel module: skipped, or failed if
// RequireModulesEnv is set to 1.
func SkipOrFailModule(tb TB, missing error) {
	tb.Helper()
	skipOrFail(tb, RequireModulesEnv, missing)
}

// SkipOrFailProgram ends a test that lacks a program which distributions have, and the machines of test/vm have not:
// SkipOrFail decides, but for those, where the test is skipped.
func SkipOrFailProgram(tb TB, missing error) {
	tb.Helper()
	if os.Getenv(RequireModulesEnv) == "1" {
		tb.Skipf("missing: %v", missing)
	}
	SkipOrFail(tb, missing)
}

// SkipUnnamed ends a test that lacks a program which an environment variable names. If the
// variable is empty, the test is skipped, with a message on standard error, as go test prints
// nothing of skipped benchmarks. If the variable is set, but the program does not run,
// SkipOrFail decides.
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
