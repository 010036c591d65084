// SPDX-License-Identifier: Apache-2.0

package hosts

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/test/golden"
)

// TestData: every profile has a name of its own, and every exception is about some of its cells.
func TestData(t *testing.T) {
	names := map[string]bool{}
	for _, p := range Profiles {
		if names[p.Name] {
			t.Errorf("two profiles have the name %s", p.Name)
		}
		names[p.Name] = true
		seen := map[Cell]bool{}
		for _, c := range p.Cells() {
			if seen[c] {
				t.Errorf("%s has cell %s twice", p.Name, c)
			}
			seen[c] = true
		}
		for what, list := range map[string][]Exception{"denied": p.Denied, "neither": p.Neither, "lost": p.Lost} {
			for _, e := range unused(list, p.Cells()) {
				t.Errorf("%s: no cell is %s by %s", p.Name, what, e)
			}
		}
	}
}

// TestPage: docs/hosts.md is what the data and the records say, which TestProfiles proves.
func TestPage(t *testing.T) {
	records, err := ReadRecords("testdata/results")
	if err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "../../../docs/hosts.md", Page(Profiles, records))
}

// TestRecord: a record is read as it was written, and does not count for a profile that has changed.
func TestRecord(t *testing.T) {
	p := Profiles[0]
	changed := *p
	changed.Node.Sysctls = []string{"net.ipv4.conf.all.rp_filter=1"}
	cells, _ := p.counted()
	for _, test := range []struct {
		result Result
		want   string
	}{
		{Result{cells, cells, ByPrograms, p.digest()}, "all"},
		{Result{cells - 1, cells, ByBoth, p.digest()}, fmt.Sprintf("%d, partly rules", cells-1)},
		{Result{cells, cells, ByRules, p.digest()}, "all, rules"},
		{Result{cells, cells, ByPrograms, changed.digest()}, "not run"},
	} {
		file := filepath.Join(t.TempDir(), "results", "6.12.txt")
		if err := (Record{p.Name: test.result}).Write(file); err != nil {
			t.Fatal(err)
		}
		records, err := ReadRecords(filepath.Dir(file))
		if err != nil {
			t.Fatal(err)
		}
		if got := records["6.12"].text(p); got != test.want {
			t.Errorf("%+v: %q, want %q", test.result, got, test.want)
		}
	}
	if got := (KernelRecords{"6.12": nil, "6.1": nil, "5.10": nil, "7.2": nil}).versions(); !slices.Equal(got, []string{"5.10", "6.1", "6.12", "7.2"}) {
		t.Errorf("order of kernels: %v", got)
	}
	file := filepath.Join(t.TempDir(), "6.12.txt")
	if err := os.WriteFile(file, []byte("routed all\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadRecord(file); err == nil {
		t.Error("a line without numbers is read")
	}
}
