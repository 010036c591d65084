// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTable(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"old.json": `{"kernel": "5.10.0-46-cloud-amd64", "features": [
			{"feature": "tcx", "state": "no", "description": "tcx attachments", "without": "clsact is used"},
			{"feature": "btf", "state": "yes"},
			{"feature": "ipvs", "state": "inconclusive", "description": "IPVS", "without": "no ipvs mode"}]}`,
		"old.sizes": "=== RUN   TestProgramSizes\n    x_test.go:39: load the programs: no\n",
		"new.json": `{"kernel": "6.12.1+deb13-cloud-amd64", "features": [
			{"feature": "tcx", "state": "yes"}, {"feature": "btf", "state": "yes"}, {"feature": "ipvs", "state": "yes"}]}`,
		"new.sizes": "    x_test.go:86: tdm_connect4                 2911 instructions verified     5306 bytes\n" +
			"    x_test.go:86: tdm_in uplink/l3               0 instructions verified    37627 bytes\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var reports []report
	for _, kernel := range []string{"old", "new"} {
		r, err := read(filepath.Join(dir, kernel))
		if err != nil {
			t.Fatal(err)
		}
		reports = append(reports, r)
	}
	var b strings.Builder
	write(&b, reports)
	var rows []string
	for line := range strings.Lines(b.String()) {
		if strings.HasPrefix(line, "|") || strings.HasPrefix(line, "Every kernel") {
			rows = append(rows, strings.TrimSpace(line))
		}
	}
	want := []string{
		"| Feature | Without it | 5.10.0-46 | 6.12.1+deb13 |",
		"|---|---|---|---|",
		"| `tcx`: tcx attachments | clsact is used |  | yes |",
		"| `ipvs`: IPVS | no ipvs mode | ? | yes |",
		"Every kernel above has `btf`.",
		"| Program | 5.10.0-46 | 6.12.1+deb13 |",
		"|---|---|---|",
		"| `tdm_connect4` |  | 2911, 5306 B |",
		"| `tdm_in uplink/l3` |  | 37627 B |",
	}
	if d := cmp.Diff(want, rows); d != "" {
		t.Errorf("rows (-want +got):\n%s", d)
	}
}
