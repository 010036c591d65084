// SPDX-License-Identifier: Apache-2.0

package golden

import (
	"os"
	"runtime"
	"testing"
)

// failing notes whether a test failed.
type failing struct {
	testing.TB
	failed bool
}

func (f *failing) Helper()               {}
func (f *failing) Errorf(string, ...any) { f.failed = true }
func (f *failing) Fatalf(string, ...any) { f.failed = true; runtime.Goexit() }

func fails(t *testing.T, file, got string) bool {
	return failed(t, func(tb testing.TB) { Compare(tb, file, got) })
}

func failed(t *testing.T, compare func(testing.TB)) bool {
	f := &failing{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		compare(f)
	}()
	<-done
	return f.failed
}

func TestCompare(t *testing.T) {
	t.Chdir(t.TempDir())
	defer func(before bool) { *update = before }(*update)
	*update = false
	if !fails(t, "a/b", "text") {
		t.Error("a file that is not there")
	}
	*update = true
	if fails(t, "a/b", "text") {
		t.Error("it was not written")
	}
	*update = false
	if fails(t, "a/b", "text") || !fails(t, "a/b", "another") {
		t.Error("the text is the same, the other is not")
	}
	if b, err := os.ReadFile("testdata/a/b"); string(b) != "text" {
		t.Errorf("%q, error %v", b, err)
	}
}

func TestShown(t *testing.T) {
	t.Chdir(t.TempDir())
	defer func(before bool) { *update = before }(*update)
	*update = false
	if err := os.WriteFile("page.md", []byte("text\n```\n$ ask\nyes\n```\nmore\n```\n$ other\n```\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	fails := func(command, says string) bool {
		return failed(t, func(tb testing.TB) { Shown(tb, "page.md", command, says) })
	}
	if fails("ask", "yes\n") || !fails("ask", "no\n") || !fails("asked", "yes\n") {
		t.Error("the page shows the command ask, which says yes")
	}
	*update = true
	if fails("ask", "no\n") {
		t.Error("it was not written")
	}
	if b, err := os.ReadFile("page.md"); string(b) != "text\n```\n$ ask\nno\n```\nmore\n```\n$ other\n```\n" {
		t.Errorf("%q, error %v", b, err)
	}
}
