// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the section of docs/compatibility.md")

// TestSection: docs/compatibility.md has the differences that are meant.
func TestSection(t *testing.T) {
	const file = "../../docs/compatibility.md"
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, _, _ := strings.Cut(string(page), sectionHead)
	want := before + Section()
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, string(page)); diff != "" {
		t.Errorf("%s; -update writes it (-want +got):\n%s", file, diff)
	}
}
