// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/proxier"
)

// families are the families of the files in testdata.
var families = map[string]proxier.Family{"ipv4": proxier.IPv4, "ipv6": proxier.IPv6}

// tableNames are in the order of iptables-save.
var tableNames = []string{"filter", "mangle", "nat"}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func saveAll(t *Tables) string {
	var text strings.Builder
	for _, name := range tableNames {
		text.WriteString(t.Save(name))
	}
	return text.String()
}

// named are the counters that rules in testdata use, including those of upstream.
var named = []string{"test_pkts", "ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"}

// restored are tables with rules.
func restored(t *testing.T, f proxier.Family, rules string) *Tables {
	t.Helper()
	tables := New(f)
	counters := NewCounters(tables)
	for _, name := range named {
		if err := counters.Ensure(name); err != nil {
			t.Fatal(err)
		}
	}
	if err := tables.Restore([]byte(rules)); err != nil {
		t.Fatal(err)
	}
	return tables
}

// TestSave: every kind of rule is printed as the tools print it. They wrote the golden files
// (TestTools).
func TestSave(t *testing.T) {
	for name, f := range families {
		t.Run(name, func(t *testing.T) {
			tables := restored(t, f, read(t, name+".rules"))
			saved := saveAll(tables)
			if diff := cmp.Diff(read(t, name+".saved"), saved); diff != "" {
				t.Errorf("saved (-want +got):\n%s", diff)
			}
			again := restored(t, f, saved)
			if diff := cmp.Diff(saved, saveAll(again)); diff != "" {
				t.Errorf("restoring and saving again differs (-first +second):\n%s", diff)
			}
		})
	}
	if saved := New(proxier.IPv4).Save("raw"); saved != "" {
		t.Errorf("unknown table saved as %q", saved)
	}
}

// lines returns the lines of a file in testdata. refused.txt has lines that the tools also refuse:
// "filter" before a line puts it in that table instead of nat. stricter.txt has lines that at
// least one of the tools accepts. base.rules are the rules that such lines change.
func lines(t *testing.T, name string) []string {
	t.Helper()
	return strings.Split(strings.TrimSuffix(read(t, name), "\n"), "\n")
}

// refusal is input whose third line is refused, followed and preceded by others that
// could be restored.
func refusal(line string) string {
	table := "nat"
	if rest, ok := strings.CutPrefix(line, "filter "); ok {
		table, line = "filter", rest
	}
	return fmt.Sprintf("*%s\n:KUBE-X - [0:0]\n%s\n-A KUBE-X -p tcp\nCOMMIT\n", table, line)
}

// TestRefuseKeeps: lines before the wrong line have no effect either.
func TestRefuseKeeps(t *testing.T) {
	for _, change := range []string{"-D KUBE-A 1", "-I KUBE-A -p udp", "-A KUBE-A -p udp", "-F KUBE-A", ":KUBE-A - [0:0]", ":POSTROUTING ACCEPT [0:0]\n-F KUBE-C\n-X KUBE-C"} {
		tables := restored(t, proxier.IPv4, read(t, "base.rules"))
		before := saveAll(tables)
		if err := tables.Restore([]byte("*nat\n" + change + "\n-A KUBE-A -p tcp\n-A KUBE-A -j KUBE-NONE\nCOMMIT\n")); err == nil {
			t.Errorf("%s: no error", change)
		}
		if diff := cmp.Diff(before, saveAll(tables)); diff != "" {
			t.Errorf("%s had an effect (-before +after):\n%s", change, diff)
		}
	}
}

// TestRefuse: an error names the line, and nothing is changed.
func TestRefuse(t *testing.T) {
	for _, line := range append(lines(t, "refused.txt"), lines(t, "stricter.txt")...) {
		tables := restored(t, proxier.IPv4, read(t, "base.rules"))
		before := saveAll(tables)
		err := tables.Restore([]byte(refusal(line)))
		var at *Error
		if !errors.As(err, &at) || at.Line != 3 {
			t.Errorf("%s: error %v, want one in line 3", line, err)
		}
		if diff := cmp.Diff(before, saveAll(tables)); diff != "" {
			t.Errorf("%s has changed (-before +after):\n%s", line, diff)
		}
	}
}

// TestRefuseInput: errors about the structure of the input.
func TestRefuseInput(t *testing.T) {
	deep := "*nat\n"
	for i := range maxDepth + 1 {
		deep += fmt.Sprintf(":KUBE-%d - [0:0]\n", i)
	}
	for i := range maxDepth {
		deep += fmt.Sprintf("-A KUBE-%d -j KUBE-%d\n", i, i+1)
	}
	for _, test := range []struct {
		name, input string
		line        int
	}{
		{"no table", "-A INPUT -j ACCEPT\n", 1},
		{"unknown table", "# comment\n*raw\nCOMMIT\n", 2},
		{"no COMMIT", "*nat\n:KUBE-A - [0:0]\n", 2},
		{"no COMMIT before the next table", "*nat\n:KUBE-A - [0:0]\n*filter\nCOMMIT\n", 3},
		{"too deep", deep + "-A PREROUTING -j KUBE-0\nCOMMIT\n", 3 + 2*maxDepth},
	} {
		tables := New(proxier.IPv4)
		err := tables.Restore([]byte(test.input))
		var at *Error
		if !errors.As(err, &at) || at.Line != test.line {
			t.Errorf("%s: error %v, want one in line %d", test.name, err, test.line)
		}
		if saved := saveAll(tables); saved != saveAll(New(proxier.IPv4)) {
			t.Errorf("%s: changed to\n%s", test.name, saved)
		}
	}
	if err := New(proxier.IPv4).Restore([]byte(deep + "-A PREROUTING -j KUBE-1\nCOMMIT\n")); err != nil {
		t.Error(err)
	}
}

// TestRestoreByTable: a table is restored although the next one is refused.
func TestRestoreByTable(t *testing.T) {
	tables := New(proxier.IPv4)
	err := tables.Restore([]byte("*nat\n:KUBE-A - [0:0]\nCOMMIT\n*filter\n:KUBE-A - [0:0]\n-A KUBE-A -j KUBE-B\nCOMMIT\n"))
	if err == nil || !strings.HasPrefix(err.Error(), "restore line 6: ") {
		t.Errorf("error %v", err)
	}
	if saved := tables.Save("nat"); !strings.Contains(saved, ":KUBE-A - [0:0]\n") {
		t.Errorf("table nat is\n%s", saved)
	}
	if saved := tables.Save("filter"); strings.Contains(saved, "KUBE-A") {
		t.Errorf("table filter is\n%s", saved)
	}
}
