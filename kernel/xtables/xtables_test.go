// SPDX-License-Identifier: Apache-2.0

//go:build linux

package xtables

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

func TestRestoreAndSave(t *testing.T) {
	forAll(t, func(t *testing.T, n *node) {
		for _, f := range families {
			t.Run(f.String(), func(t *testing.T) {
				n.restore(f, "*nat\n:OTHER - [0:0]\n-A OTHER -m comment --comment \"a \\\"b\\\"\" -j RETURN\nCOMMIT\n")
				n.restore(f, "*nat\n:OURS - [0:0]\n-A OURS\n-A OURS -p tcp -m tcp --dport 80 -j OTHER\nCOMMIT\n*filter\n:OURS - [0:0]\nCOMMIT\n")
				nat := n.save(f, "nat")
				for name, want := range map[string]Chain{
					"OUTPUT": {Name: "OUTPUT", Policy: "ACCEPT"},
					"OTHER":  {Name: "OTHER", Policy: "-", Rules: []string{`-m comment --comment "a \"b\"" -j RETURN`}},
					"OURS":   {Name: "OURS", Policy: "-", Rules: []string{"", "-p tcp -m tcp --dport 80 -j OTHER"}},
				} {
					if diff := cmp.Diff(&want, nat.Chain(name)); diff != "" {
						t.Errorf("(-want +got):\n%s", diff)
					}
				}
				if n.save(f, "filter").Chain("OURS") == nil {
					t.Error("the second table was not written")
				}
				// Defining a chain again replaces its rules.
				n.restore(f, "*nat\n:OURS - [0:0]\nCOMMIT\n")
				if got := n.save(f, "nat").Chain("OURS").Rules; len(got) != 0 {
					t.Errorf("got %q, want an empty chain", got)
				}
			})
		}
	})
}

func TestRestoreErrors(t *testing.T) {
	type refusal struct {
		line int
		text string // of the error
	}
	for _, tc := range []struct {
		name, input string
		nft, legacy refusal
	}{
		{
			"a chain that does not exist", "*nat\n:A - [0:0]\n-A A -j RETURN\n-A A -j NONE\n-A A -j RETURN\nCOMMIT\n",
			refusal{4, "Chain 'NONE' does not exist"}, refusal{4, "Couldn't load target `NONE'"},
		},
		{
			"the same in the second table", "*filter\n:NONE - [0:0]\n:A - [0:0]\n-A A -j NONE\nCOMMIT\n*nat\n:A - [0:0]\n-A A -g NONE\nCOMMIT\n",
			refusal{8, "Chain 'NONE' does not exist"}, refusal{8, "goto 'NONE' is not a chain"},
		},
		{
			"a bad option", "*nat\n:A - [0:0]\n-A A --nonsense 1\nCOMMIT\n",
			refusal{3, `unknown option "--nonsense"`}, refusal{3, `unknown option "--nonsense"`},
		},
		{
			"a match that does not exist", "*nat\n:A - [0:0]\n-A A -m nonsense\nCOMMIT\n",
			refusal{3, "the extension is missing"}, refusal{3, "the extension is missing"},
		},
		{
			"a chain in use", "*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j B\n-X B\nCOMMIT\n",
			refusal{5, "CHAIN_DEL failed"}, refusal{5, "line 5 failed"},
		},
		{
			"an unknown chain deleted", "*nat\n-X A\nCOMMIT\n",
			refusal{2, "No chain/target/match by that name"}, refusal{2, "line 2 failed"},
		},
		{
			"an unknown chain filled", "*nat\n-A A -j RETURN\nCOMMIT\n",
			refusal{2, "No chain/target/match by that name"}, refusal{2, "line 2 failed"},
		},
		{
			"refused by the kernel", "*nat\n:A - [0:0]\n-A A -j RETURN\n-A OUTPUT -j MASQUERADE\n-A A -j RETURN\nCOMMIT\n",
			refusal{4, "RULE_APPEND failed (Invalid argument)"}, refusal{6, "line 6 failed"},
		},
		{
			"a loop", "*nat\n:A - [0:0]\n:B - [0:0]\n-A OUTPUT -j A\n-A A -j B\n-A B -j A\nCOMMIT\n",
			refusal{6, "RULE_APPEND failed (Too many links)"}, refusal{7, "line 7 failed"},
		},
		{
			"no end", "*nat\n:A - [0:0]\n",
			refusal{3, "COMMIT expected"}, refusal{3, "COMMIT expected"},
		},
		{
			"no table", ":A - [0:0]\nCOMMIT\n",
			refusal{1, "line 1 failed"}, refusal{1, "line 1 failed"},
		},
		{
			"a long name", "*nat\n:" + strings.Repeat("A", 40) + " - [0:0]\nCOMMIT\n",
			refusal{2, "too long"}, refusal{2, "Invalid chain name"},
		},
		{
			"no command", "*nat\nnonsense\nCOMMIT\n",
			refusal{2, "Bad argument"}, refusal{2, "Bad argument"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forAll(t, func(t *testing.T, n *node) {
				for _, f := range families {
					before := n.save(f, "nat")
					err := n.at.Do(func() error { return n.tools.Restore(bg, f, []byte(tc.input)) })
					want := tc.nft
					if n.tools.Variant() == Legacy {
						want = tc.legacy
					}
					failed, ok := err.(*RestoreError)
					if !ok || failed.Line != want.line || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), want.text) {
						t.Errorf("%s: got %v, want line %d and %q", f, err, want.line, want.text)
					}
					if diff := cmp.Diff(before.Chains, n.save(f, "nat").Chains); diff != "" {
						t.Errorf("%s: the table has changed (-before +after):\n%s", f, diff)
					}
				}
			})
		})
	}
}

// TestRestoreFailures: errors that are not about the input are no RestoreError.
func TestRestoreFailures(t *testing.T) {
	for _, tc := range []struct{ name, script, want string }{
		{"killed", "echo 'line 3: RULE_APPEND failed' >&2; kill -9 $$", "signal: killed"},
		{"no lock file", "echo \"Fatal: can't open lock file /run/xtables.lock: Permission denied\" >&2; exit 4", "mount the host's /run/xtables.lock"},
		{"no capability", "echo 'iptables-nft-restore v1.8.9 (nf_tables): Could not fetch rule set generation id: Permission denied (you must be root)' >&2; exit 4", "CAP_NET_ADMIN is needed"},
		{"no kernel", "echo 'iptables-nft-restore v1.8.9 (nf_tables): Could not fetch rule set generation id: Invalid argument' >&2; exit 4", "load the kernel module nf_tables"},
		{"no table", "echo \"iptables-restore: unable to initialize table 'nat'\n\nError occurred at line: 1\" >&2; exit 2", "load the kernel module of the table"},
		{"no words", "exit 1", "exit status 1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tools, err := newTools(NFT, []string{scripts(t, "v1.8.9 (nf_tables)", tc.script)}, 1)
			if err != nil {
				t.Fatal(err)
			}
			err = tools.Restore(bg, inet.IPv4, []byte(harmless))
			if _, refused := err.(*RestoreError); err == nil || refused || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v (%[1]T), want %q", err, tc.want)
			}
		})
	}
	forAll(t, func(t *testing.T, n *node) {
		err := n.at.Do(func() error { return n.tools.Restore(bg, inet.IPv4, []byte("*nonsense\nCOMMIT\n")) })
		if _, refused := err.(*RestoreError); err == nil || refused {
			t.Errorf("a table that does not exist: got %v (%[1]T)", err)
		}
	})
}

// TestTablesAreWrittenOneByOne: a table of the input is written even if a later one is refused.
func TestTablesAreWrittenOneByOne(t *testing.T) {
	forAll(t, func(t *testing.T, n *node) {
		err := n.at.Do(func() error {
			return n.tools.Restore(bg, inet.IPv4, []byte("*filter\n:A - [0:0]\nCOMMIT\n*nat\n:A - [0:0]\n-A A -j NONE\nCOMMIT\n"))
		})
		if failed, ok := err.(*RestoreError); !ok || failed.Line != 6 {
			t.Errorf("got %v, want line 6", err)
		}
		if n.save(inet.IPv4, "filter").Chain("A") == nil || n.save(inet.IPv4, "nat").Chain("A") != nil {
			t.Error("want the chain in filter and not in nat")
		}
	})
}

func TestAdvice(t *testing.T) {
	for _, tc := range []struct{ output, want string }{
		{"Fatal: can't open lock file /run/xtables.lock: Permission denied", "mount the host's /run/xtables.lock"},
		{"iptables-save v1.8.9 (legacy): Cannot initialize: Permission denied (you must be root)", "CAP_NET_ADMIN"},
		{"iptables-nft-save v1.8.9 (nf_tables): Could not fetch rule set generation id: Permission denied (you must be root)", "CAP_NET_ADMIN"},
		{"iptables-nft-save v1.8.9 (nf_tables): Could not fetch rule set generation id: Invalid argument", "kernel module nf_tables"},
		{"iptables-save v1.8.9 (legacy): Cannot initialize: Table does not exist (do you need to insmod?)", "iptable_nat"},
		{"Couldn't load match `nonsense':No such file or directory", "package iptables"},
		{"Warning: Extension statistic revision 0 not supported, missing kernel module?", "nft_compat"},
	} {
		if got := advice(tc.output); !strings.Contains(got, tc.want) {
			t.Errorf("%s: got %q, want %q", tc.output, got, tc.want)
		}
	}
	if got := advice("line 3 failed"); got != "" {
		t.Errorf("got %q, want none", got)
	}
}

func TestOutputIsBounded(t *testing.T) {
	_, err := run(bg, "/bin/sh", []byte("yes complaint | head -c 100000 >&2; exit 1"))
	failed, ok := err.(*failure)
	if !ok || len(failed.output) != maxOutput+len(" …") || !strings.HasPrefix(failed.output, "complaint\n") {
		t.Errorf("got %v, want the first %d bytes of the output", err, maxOutput)
	}
}

// TestFirstOfManyErrors: if the kernel refuses 1,000 rules, the error is about the first one.
func TestFirstOfManyErrors(t *testing.T) {
	n := newNode(t, NFT)
	input := "*nat\n" + strings.Repeat("-A OUTPUT -j MASQUERADE\n", 1000) + "COMMIT\n"
	err := n.at.Do(func() error { return n.tools.Restore(bg, inet.IPv4, []byte(input)) })
	if failed, ok := err.(*RestoreError); !ok || failed.Line != 2 {
		t.Errorf("got %v, want line 2", err)
	}
}

// holdLock holds the lock of the legacy programs until the test ends.
func holdLock(t *testing.T) {
	t.Helper()
	file, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
}

const harmless = "*nat\n:A - [0:0]\nCOMMIT\n"

func TestLock(t *testing.T) {
	forAll(t, func(t *testing.T, n *node) {
		var err error
		if n.tools, err = newTools(n.tools.Variant(), searchPath(), 1); err != nil {
			t.Fatal(err)
		}
		holdLock(t)
		want := func(step string, err error) {
			t.Helper()
			if locks := n.tools.Variant() == Legacy; errors.Is(err, ErrLocked) != locks || !locks && err != nil {
				t.Errorf("%s: got %v", step, err)
			}
		}
		want("restore", n.at.Do(func() error { return n.tools.Restore(bg, inet.IPv4, []byte(harmless)) }))
		n.save(inet.IPv4, "nat") // takes no lock

		// A lock file named in the environment would not exclude other programs.
		t.Setenv("XTABLES_LOCKFILE", t.TempDir()+"/lock")
		want("restore with a lock of the environment", n.at.Do(func() error { return n.tools.Restore(bg, inet.IPv4, []byte(harmless)) }))
	})
}

func TestContext(t *testing.T) {
	n := newNode(t, Legacy)
	holdLock(t)
	ctx, cancel := context.WithTimeout(bg, 50*time.Millisecond)
	defer cancel()
	start := time.Now()
	err := n.at.Do(func() error { return n.tools.Restore(ctx, inet.IPv4, []byte(harmless)) })
	if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > lockWait*time.Second/2 {
		t.Errorf("got %v after %v, want context.DeadlineExceeded", err, time.Since(start))
	}
	for step, call := range map[string]func() error{
		"save":   func() error { _, err := n.tools.Save(ctx, inet.IPv4, "nat"); return err },
		"usable": func() error { return n.tools.Usable(ctx, inet.IPv4) },
		"find":   func() error { _, err := Find(ctx); return err },
	} {
		if err := n.at.Do(call); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got %v, want context.DeadlineExceeded", step, err)
		}
	}
}

func TestUsableLeavesNothing(t *testing.T) {
	forAll(t, func(t *testing.T, n *node) {
		for _, f := range families {
			for _, table := range []string{"filter", "nat"} {
				for _, c := range n.save(f, table).Chains {
					if c.Policy != "ACCEPT" || len(c.Rules) > 0 {
						t.Errorf("%s: got %v in table %s", f, c, table)
					}
				}
			}
		}
	})
}

func TestUnwrittenTable(t *testing.T) {
	forAll(t, func(t *testing.T, n *node) {
		table := n.save(inet.IPv4, "raw")
		if table.Name != "raw" || slices.ContainsFunc(table.Chains, func(c Chain) bool { return c.Policy != "ACCEPT" || len(c.Rules) > 0 }) {
			t.Errorf("got %v, want at most the kernel's chains", table)
		}
		err := n.at.Do(func() error { _, err := n.tools.Save(bg, inet.IPv4, "nonsense"); return err })
		if err == nil || !strings.HasPrefix(err.Error(), "save table nonsense: ip") {
			t.Errorf("a table that does not exist: got %v", err)
		}
	})
}

// TestSaveAll: tables that are read together are the same as those that are read separately. A
// table without rules is included.
func TestSaveAll(t *testing.T) {
	forAll(t, func(t *testing.T, n *node) {
		for f := range inet.Families {
			n.restore(f, "*filter\n:KUBE-A - [0:0]\n-A KUBE-A -j DROP\nCOMMIT\n*nat\n:KUBE-B - [0:0]\nCOMMIT\n")
			var all map[string]*Table
			n.do(func() (err error) {
				all, err = n.tools.SaveAll(t.Context(), f, "filter", "nat", "mangle")
				return err
			})
			if all["filter"].Chain("KUBE-A") == nil || all["nat"].Chain("KUBE-B") == nil {
				t.Errorf("%s: a chain is missing", f)
			}
			if unwritten := all["mangle"]; slices.ContainsFunc(unwritten.Chains, func(c Chain) bool { return len(c.Rules) > 0 }) {
				t.Errorf("%s: got %v, want at most the kernel's chains", f, unwritten)
			}
			for _, name := range []string{"filter", "nat"} {
				if got, want := format([]*Table{all[name]}), format([]*Table{n.save(f, name)}); got != want {
					t.Errorf("%s %s:\n%swant\n%s", f, name, got, want)
				}
			}
		}
	})
}

// BenchmarkSave reads the nat table of 1,000 Services.
func BenchmarkSave(b *testing.B) {
	for _, v := range variants {
		b.Run(v.String(), func(b *testing.B) {
			n := newNode(b, v)
			text := "*nat\n:KUBE-MARK-MASQ - [0:0]\nCOMMIT\n" + saved(1000)
			n.restore(inet.IPv4, text)
			b.ReportAllocs()
			for b.Loop() {
				n.save(inet.IPv4, "nat")
			}
		})
	}
}
