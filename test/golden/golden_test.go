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
	f := &failing{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		Compare(f, file, got)
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
