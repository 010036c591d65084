// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var exported = cmpopts.IgnoreUnexported(Table{})

func TestParse(t *testing.T) {
	for _, tc := range []struct {
		name, text string
		want       []*Table
		err        string
	}{
		{name: "nothing"},
		{name: "comments alone", text: "# Warning: \"iptables-legacy tables present\n# Table `x' is incompatible\n"},
		{
			name: "tables",
			text: "# Generated\n*mangle\n:OUTPUT ACCEPT [1:2]\nCOMMIT\n*nat\n:OUTPUT DROP [0:0]\n:KUBE-A - [0:0]\n" +
				"-A OUTPUT -m comment --comment \"to A\" -j KUBE-A\n-A OUTPUT\n-A KUBE-A -j RETURN\nCOMMIT\n# Completed\n",
			want: []*Table{
				{Name: "mangle", Chains: []Chain{{Name: "OUTPUT", Policy: "ACCEPT"}}},
				{Name: "nat", Chains: []Chain{
					{Name: "OUTPUT", Policy: "DROP", Rules: []string{`-m comment --comment "to A" -j KUBE-A`, ""}},
					{Name: "KUBE-A", Policy: "-", Rules: []string{"-j RETURN"}},
				}},
			},
		},
		{
			name: "counters",
			text: "*nat\n:A - [3:4]\n[12:3456] -A A -j RETURN\nCOMMIT",
			want: []*Table{{Name: "nat", Chains: []Chain{{Name: "A", Policy: "-", Rules: []string{"-j RETURN"}}}}},
		},
		{
			name: "quotes and line breaks in comments",
			text: "*nat\n:A - [0:0]\n-A A -m comment --comment \"a\n-A A \\\" \\\\\" -j X\n-A A -j Y\nCOMMIT\n",
			want: []*Table{{Name: "nat", Chains: []Chain{
				{Name: "A", Policy: "-", Rules: []string{"-m comment --comment \"a\n-A A \\\" \\\\\" -j X", "-j Y"}},
			}}},
		},
		{
			name: "chains in turns",
			text: "*nat\n:A - [0:0]\n:B - [0:0]\n-A A 1\n-A B 1\n-A A 2\n-A B 2\n-A A 3\nCOMMIT\n",
			want: []*Table{{Name: "nat", Chains: []Chain{
				{Name: "A", Policy: "-", Rules: []string{"1", "2", "3"}}, {Name: "B", Policy: "-", Rules: []string{"1", "2"}},
			}}},
		},
		{name: "unknown", text: "*nat\n:A - [0:0]\n-X A\nCOMMIT\n", err: `line 3: neither a table, a chain, a rule nor a comment: "-X A"`},
		{name: "empty line", text: "*nat\n\nCOMMIT\n", err: `line 2: neither a table, a chain, a rule nor a comment: ""`},
		{name: "counted after a line break", text: "*nat\n:A - [0:0]\n-A A \"\n\"\nfoo\n", err: `line 5: neither a table, a chain, a rule nor a comment: "foo"`},
		{name: "no table", text: "# x\n:A - [0:0]\n", err: `line 2: not in a table: ":A - [0:0]"`},
		{name: "two tables", text: "*nat\n*nat\n", err: `line 2: a table within a table: "*nat"`},
		{name: "unknown chain", text: "*nat\n-A A -j X\n", err: `line 2: a rule of a chain that is not defined: "-A A -j X"`},
		{name: "chain twice", text: "*nat\n:A - [0:0]\n:A - [0:0]\n", err: `line 3: a chain is defined twice: ":A - [0:0]"`},
		{name: "open quote", text: "*nat\n:A - [0:0]\n-A A \"x\n", err: `line 3: a quote does not end: "-A A \"x"`},
		{name: "cut off", text: "*nat\n:A - [0:0]\n", err: "line 2: the text ends within table nat"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := parse(tc.text)
			if fmt.Sprint(err) != tc.err && (err != nil || tc.err != "") {
				t.Fatalf("got error %v, want %s", err, tc.err)
			}
			if diff := cmp.Diff(tc.want, got, exported); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestChain(t *testing.T) {
	made := &Table{Chains: []Chain{{Name: "A"}, {Name: "B"}}}
	tables, err := parse("*nat\n:A - [0:0]\n:B - [0:0]\nCOMMIT\n")
	if err != nil {
		t.Fatal(err)
	}
	for name, table := range map[string]*Table{"made": made, "parsed": tables[0]} {
		if got := table.Chain("B"); got != &table.Chains[1] {
			t.Errorf("%s: got %v, want B", name, got)
		}
		if got := table.Chain("C"); got != nil {
			t.Errorf("%s: got %v, want none", name, got)
		}
		table.Chains = table.Chains[1:]
		if got := table.Chain("B"); got != &table.Chains[0] {
			t.Errorf("%s, without A: got %v, want B", name, got)
		}
	}
}

// TestRulesCanBeAppended: chains share memory, but appending a rule to one does not change another.
func TestRulesCanBeAppended(t *testing.T) {
	tables, err := parse("*nat\n:A - [0:0]\n:B - [0:0]\n-A A 1\n-A B 1\nCOMMIT\n")
	if err != nil {
		t.Fatal(err)
	}
	a, b := tables[0].Chain("A"), tables[0].Chain("B")
	a.Rules = append(a.Rules, "2")
	if b.Rules[0] != "1" {
		t.Errorf("got %q in B", b.Rules)
	}
}

// format prints parsed tables, without comments and counters.
func format(tables []*Table) string {
	var b strings.Builder
	for _, t := range tables {
		fmt.Fprintf(&b, "*%s\n", t.Name)
		for _, c := range t.Chains {
			fmt.Fprintf(&b, ":%s %s [0:0]\n", c.Name, c.Policy)
		}
		for _, c := range t.Chains {
			for _, rule := range c.Rules {
				fmt.Fprintf(&b, "-A %s %s\n", c.Name, rule)
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

func FuzzParse(f *testing.F) {
	f.Add("*nat\n:A - [0:0]\n[1:2] -A A -m comment --comment \"a\n\\\"\" -j X\nCOMMIT\n")
	f.Add("# x\n*nat\n:A - [0:0]\n:B ACCEPT [0:0]\n-A A\n-A B x\n-A A y\nCOMMIT\n*filter\nCOMMIT\n")
	f.Fuzz(func(t *testing.T, text string) {
		first, err := parse(text)
		if err != nil {
			return
		}
		printed := format(first)
		second, err := parse(printed)
		if err != nil {
			t.Fatalf("%v\n%s", err, printed)
		}
		if diff := cmp.Diff(first, second, exported); diff != "" {
			t.Errorf("(-first +second):\n%s", diff)
		}
	})
}

// saved returns the nat table for many Services with two endpoints each. Chain names are hashes, as
// in real tables: if chains are created in the order of their names, save of the nft variant takes
// quadratic time.
func saved(services int) string {
	hash := func(kind string, n int) string {
		sum := sha256.Sum256(fmt.Append(nil, kind, n))
		return "KUBE-" + kind + "-" + base32.StdEncoding.EncodeToString(sum[:])[:16]
	}
	var chains, entries, rules strings.Builder
	for i := range services {
		svc := hash("SVC", i)
		fmt.Fprintf(&chains, ":%s - [0:0]\n", svc)
		fmt.Fprintf(&entries, "-A KUBE-SERVICES -d 10.96.%d.%d/32 -p tcp -m comment --comment \"ns/svc-%d cluster IP\" -m tcp --dport 80 -j %s\n", i/256, i%256, i, svc)
		for j, share := range []string{"-m statistic --mode random --probability 0.50000000000 ", ""} {
			sep := hash("SEP", 2*i+j)
			fmt.Fprintf(&chains, ":%s - [0:0]\n", sep)
			fmt.Fprintf(&rules, "-A %s -m comment --comment \"ns/svc-%d -> 10.244.0.%d:8080\" %s-j %s\n", svc, i, j, share, sep)
		}
		for j := range 2 {
			sep := hash("SEP", 2*i+j)
			fmt.Fprintf(&rules, "-A %s -s 10.244.0.%d/32 -j KUBE-MARK-MASQ\n", sep, j)
			fmt.Fprintf(&rules, "-A %s -p tcp -m tcp -j DNAT --to-destination 10.244.0.%d:8080\n", sep, j)
		}
	}
	return "*nat\n:KUBE-SERVICES - [0:0]\n" + chains.String() + entries.String() + rules.String() + "COMMIT\n"
}

func BenchmarkParse(b *testing.B) {
	for _, services := range []int{100, 10_000} {
		text := saved(services)
		b.Run(fmt.Sprintf("lines=%d", strings.Count(text, "\n")), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				if _, err := parse(text); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
