// SPDX-License-Identifier: Apache-2.0

package install

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "page.md")
	const text = "# Top\n\n```\na\n```\n\n## Below `it`\n\n1. step\n   ```yaml\n   b\n   # no heading\n   ```\n2. step\n   ```\n   c\n   ```\n"
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := readPage(file)
	want := page{"Top": {"a\n"}, "Below `it`": {"   b\n   # no heading\n", "   c\n"}}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("error %v, (-want +got):\n%s", err, d)
	}
	if err := os.WriteFile(file, []byte("```\na\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readPage(file); err == nil {
		t.Error("no error for a block without an end")
	}
}
