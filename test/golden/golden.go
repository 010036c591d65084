// SPDX-License-Identifier: Apache-2.0

// Package golden compares results of tests with files of their testdata. -update rewrites
// these.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// Compare compares a text with a file of testdata.
func Compare(t testing.TB, file, got string) {
	t.Helper()
	path := filepath.Join("testdata", file)
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (-update creates it)", err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s (-want +got), -update rewrites:\n%s", path, d)
	}
}

// Shown compares what a page shows below a command ("$ command"), to the end of that block, with what it says.
func Shown(t testing.TB, page, command, says string) {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), "\n$ "+command+"\n")
	_, after, closed := strings.Cut(rest, "\n```\n")
	if !found || !closed {
		t.Fatalf("%s has no block with %q", page, "$ "+command)
	}
	Compare(t, filepath.Join("..", page), before+"\n$ "+command+"\n"+strings.TrimSuffix(says, "\n")+"\n```\n"+after)
}
