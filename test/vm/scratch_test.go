// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"os"
	"path/filepath"
	"testing"
)

// Directories of killed processes are removed, those of running ones are kept.
func TestScratch(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	c := &Cache{dir: t.TempDir()}
	one, done, err := c.scratch()
	if err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(os.TempDir(), "tandem-machine-1")
	if err := os.Mkdir(left, 0o755); err != nil {
		t.Fatal(err)
	}
	two, doneTwo, err := c.scratch()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); err == nil {
		t.Error("what was left is still there")
	}
	if _, err := os.Stat(one); err != nil || one == two {
		t.Errorf("the first one, of two: %v", err)
	}
	for _, d := range []func() error{done, doneTwo} {
		if err := d(); err != nil {
			t.Error(err)
		}
	}
	if list, _ := os.ReadDir(os.TempDir()); len(list) > 0 {
		t.Errorf("left: %v", list)
	}
}
