// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

// TestGoneAndRepaired: if a Service is deleted while a shared chain that jumps to its chains must be
// repaired, its chains are deleted after the repair.
func TestGoneAndRepaired(t *testing.T) {
	n := newNode(t, newSimulated())
	n.Serve(0, 20, 2)
	n.MustSync()
	n.Tools.Before = func(string) error { return xtables.ErrLocked }
	n.OnServiceDelete(service(1))
	if err := n.Sync(t.Context()); !errors.Is(err, xtables.ErrLocked) {
		t.Fatalf("error %v", err)
	}
	n.Tools.Before = nil
	if err := n.Tools.Tools.Restore(t.Context(), proxier.IPv4, []byte("*nat\n-I KUBE-SERVICES 1 -j RETURN\nCOMMIT\n")); err != nil {
		t.Fatal(err)
	}
	n.Tools.Take()
	calls := 0
	n.Tools.Before = func(string) error { calls++; return nil }
	n.MustFullSync()
	if wrote := n.Tools.Take(); len(wrote) != calls || len(n.Problems) > 0 {
		t.Errorf("%d of %d restores succeeded, reported %+v", len(wrote), calls, n.Problems)
	}
	want := newNode(t, newSimulated())
	want.Serve(0, 20, 2)
	want.OnServiceDelete(service(1))
	want.MustSync()
	if diff := cmp.Diff(saved(t, want.Tools, proxier.IPv4), saved(t, n.Tools, proxier.IPv4)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestErrors: if any call of the tools fails, Sync returns an error. The next sync writes what is
// pending, whatever its update contains.
func TestErrors(t *testing.T) {
	steps := []func(n *node){
		func(n *node) { n.Serve(0, 60, 2) },
		func(n *node) { n.OnServiceDelete(service(3)); n.OnServiceDelete(service(8)) },
		func(n *node) { n.Serve(100, 1, 2); n.OnServiceAdd(service(3, kindOf(3)...)) },
		func(n *node) { n.Serve(100, 100, 1) },
	}
	want := newNode(t, newSimulated())
	for _, step := range steps {
		step(want)
	}
	want.MustSync()
	want.MustFullSync()
	for _, full := range []bool{false, true} {
		for at, more := 1, true; more; at += 1 + at/4 {
			n := newNode(t, newSimulated())
			call, failed := 0, 0
			n.Tools.Before = func(string) error {
				if call++; call%at == 0 && failed < 3 {
					failed++
					return xtables.ErrLocked
				}
				return nil
			}
			errs := 0
			sync := func(f func() error) {
				if err := f(); errors.Is(err, xtables.ErrLocked) {
					errs++
				} else if err != nil {
					t.Fatal(err)
				}
			}
			for _, step := range steps {
				step(n)
				sync(func() error { return n.Sync(t.Context()) })
				if full {
					sync(n.FullSync)
				}
			}
			for range 3 { // the maximum number of failures
				sync(n.FullSync)
			}
			more = failed > 0
			if (errs > 0) != (failed > 0) || len(n.Problems) > 0 {
				t.Fatalf("call %d: %d failures, %d errors; reported %+v", at, failed, errs, n.Problems)
			}
			for _, f := range []proxier.Family{proxier.IPv4, proxier.IPv6} {
				if diff := cmp.Diff(saved(t, want.Tools, f), saved(t, n.Tools, f)); diff != "" {
					t.Fatalf("every call %d fails (-want +got):\n%.3000s", at, diff)
				}
			}
		}
	}
}

// TestPending: after errors, a sync with an empty update writes everything that is pending.
func TestPending(t *testing.T) {
	n := newNode(t, newSimulated())
	n.Serve(0, 20, 2)
	n.MustSync()
	fail := true
	n.Tools.Before = func(string) error {
		if fail {
			return errors.New("out of order")
		}
		return nil
	}
	n.OnServiceDelete(service(1, kindOf(1)...))
	n.Serve(20, 5, 1)
	if err := n.Sync(t.Context()); err == nil {
		t.Fatal("no error")
	}
	// Another Service is created with the address of the deleted one.
	n.Serve(30, 3, 1)
	n.OnServiceAdd(service(1, kindOf(1)...))
	if err := n.Sync(t.Context()); err == nil {
		t.Fatal("no error")
	}
	fail = false
	n.Tools.Take()
	if err := n.Tier.Sync(t.Context(), proxier.Update{}); err != nil {
		t.Fatal(err)
	}
	if wrote := n.Tools.Take(); len(wrote) != 2 || len(n.Problems) > 0 { // once in each family, so nothing was refused
		t.Errorf("%d times written, reported %+v", len(wrote), n.Problems)
	}
	want := newNode(t, newSimulated())
	want.Serve(0, 25, 2)
	for i := 20; i < 25; i++ {
		want.OnEndpointSliceUpdate(nil, endpoints(i, pod(i)))
	}
	want.Serve(30, 3, 1)
	want.OnServiceAdd(service(1, kindOf(1)...))
	want.MustSync()
	if diff := cmp.Diff(saved(t, want.Tools, proxier.IPv4), saved(t, n.Tools, proxier.IPv4)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

var comments = regexp.MustCompile(`-m comment --comment "[^"]*" `)

// TestDeath: a process can end between any two calls of the tools, or a call fails and the process
// continues. Frontends that exist before and after a change are served at every moment, and in the
// end all rules are correct.
func TestDeath(t *testing.T) {
	changes := map[string]struct{ before, after func(n *node) }{
		"start": {func(*node) {}, func(n *node) { n.Serve(0, 60, 2) }},
		"flat":  {func(n *node) { n.Serve(0, 60, 2) }, func(n *node) { n.Serve(5, 70, 3) }},
		"split": {func(n *node) { n.Serve(0, 90, 2) }, func(n *node) { n.Serve(5, 160, 2) }},
		"join":  {func(n *node) { n.Serve(0, 160, 2) }, func(n *node) { n.Serve(5, 30, 2) }},
		"tree":  {func(n *node) { n.Serve(0, 160, 2) }, func(n *node) { n.Serve(0, 161, 1) }},
		"one": {func(n *node) { n.Serve(0, 140, 1) }, func(n *node) {
			n.Serve(0, 140, 1)
			n.OnEndpointSliceUpdate(nil, endpoints(1, pod(7))) // one of two Services in a chain of the tree
		}},
		"comments": {func(n *node) { n.Serve(0, 70, 18) }, func(n *node) { n.Serve(0, 70, 2) }},
	}
	step := 1
	if testing.Short() {
		step = 9 // odd, so that some processes end and others continue
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			want := newNode(t, newSimulated())
			change.after(want)
			want.MustSync()
			want.MustFullSync()
			// Comments of rules do not matter.
			frontends := func(n *node) []string {
				list, _ := entries(t, n.Tools, proxier.IPv4)
				for i := range list {
					list[i] = comments.ReplaceAllString(list[i], "")
				}
				return list
			}
			wanted := frontends(want)
			for i := 0; ; i += step {
				calls, goesOn := i, false
				if name == "flat" || name == "comments" {
					calls, goesOn = i/2, i%2 == 1
				}
				n := newNode(t, newSimulated())
				change.before(n)
				n.MustSync()
				n.MustFullSync()
				there := slices.DeleteFunc(frontends(n), func(r string) bool { return !slices.Contains(wanted, r) })
				n.Tools.After = func(f proxier.Family) {
					if f != proxier.IPv4 {
						return
					}
					if missing := without(there, frontends(n)); len(missing) > 0 {
						t.Fatalf("after %d calls: lost %q", calls, missing)
					}
				}
				n.restart()
				change.after(n)
				ended, call := false, 0
				n.Tools.Before = func(string) error {
					if call++; call == calls+1 || call > calls && !goesOn {
						ended = true
						return errors.New("ended")
					}
					return nil
				}
				_ = n.Sync(t.Context())
				n.Tools.Before = nil
				if !goesOn {
					n.restart()
					change.after(n)
				}
				n.MustSync()
				for _, f := range []proxier.Family{proxier.IPv4, proxier.IPv6} {
					if diff := cmp.Diff(saved(t, want.Tools, f), saved(t, n.Tools, f)); diff != "" {
						t.Fatalf("after %d calls (-want +got):\n%.3000s", calls, diff)
					}
				}
				if !ended {
					break
				}
			}
		})
	}
}
