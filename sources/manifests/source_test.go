// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/test/configmap"
)

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// replace writes a file the way the package comment recommends.
func replace(t testing.TB, path, text string) {
	t.Helper()
	write(t, path+".tmp", text)
	if err := os.Rename(path+".tmp", path); err != nil {
		t.Fatal(err)
	}
}

func TestRunWatches(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a.yaml"), service("a", 1)+slice("a-1", "a", "10.244.0.1"))
	rec := newRecorder()
	// Nothing may depend on the rescan here.
	run(t, New(dir, rec, rec, Options{Rescan: time.Hour}), true)
	rec.waitFor(t, "nodes synced")
	want := []string{
		"add service default/a 10.96.0.1", "add slice default/a-1 of a 10.244.0.1",
		"services synced", "slices synced", "nodes synced",
	}
	if diff := cmp.Diff(want, rec.news()); diff != "" {
		t.Errorf("the first list (-want +got):\n%s", diff)
	}

	replace(t, filepath.Join(dir, "b.yaml"), service("b", 2))
	rec.waitFor(t, "add service default/b 10.96.0.2")
	write(t, filepath.Join(dir, "b.yaml"), service("b", 3)) // in place
	rec.waitFor(t, "update service default/b 10.96.0.3")
	replace(t, filepath.Join(dir, "b.yaml"), service("b", 4)) // replaced
	rec.waitFor(t, "update service default/b 10.96.0.4")
	write(t, filepath.Join(dir, "c.yaml"), "kind: [")
	rec.waitFor(t, "problem InvalidFile")
	if err := os.Remove(filepath.Join(dir, "b.yaml")); err != nil {
		t.Fatal(err)
	}
	rec.waitFor(t, "delete service default/b")
	if slices.ContainsFunc(rec.news(), func(l string) bool { return strings.HasPrefix(l, "delete service default/a") }) {
		t.Error("a Service of another file was deleted")
	}
}

// A volume of a ConfigMap: files are links through ..data, which is switched.
func TestRunConfigMapVolume(t *testing.T) {
	dir := t.TempDir()
	version := func(n int) {
		t.Helper()
		if err := configmap.Update(dir, map[string]string{"a.yaml": service("a", n)}); err != nil {
			t.Fatal(err)
		}
	}
	version(1)
	rec := newRecorder()
	run(t, New(dir, rec, rec, Options{Rescan: time.Hour}), true)
	rec.waitFor(t, "services synced")
	version(2)
	rec.waitFor(t, "update service default/a 10.96.0.2")
	if got := strings.Join(rec.news(), "\n"); strings.Contains(got, "delete") || strings.Contains(got, "problem") {
		t.Errorf("switching the volume led to:\n%s", got)
	}
}

func TestRunDirectoryVanishesAndReturns(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "manifests")
	fill := func(at string, n int) {
		if err := os.Mkdir(at, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(at, "a.yaml"), service("a", n))
	}
	fill(dir, 1)
	rec := newRecorder()
	run(t, New(dir, rec, rec, Options{Rescan: time.Hour}), true)
	rec.waitFor(t, "nodes synced")
	for n := 2; n < 5; n++ {
		rec.news()
		if err := os.Rename(dir, fmt.Sprintf("%s.%d", dir, n)); err != nil {
			t.Fatal(err)
		}
		rec.waitFor(t, "problem InvalidFile File /"+dir+" [] cannot read the manifest directory, keeping the last state")
		fill(dir+".new", n)
		if err := os.Rename(dir+".new", dir); err != nil {
			t.Fatal(err)
		}
		rec.waitFor(t, fmt.Sprintf("update service default/a 10.96.0.%d", n))
		// The new directory is watched, not the old one.
		write(t, filepath.Join(dir, "a.yaml"), service("a", 100+n))
		rec.waitFor(t, fmt.Sprintf("update service default/a 10.96.0.%d", 100+n))
		if got := strings.Join(rec.news(), "\n"); strings.Contains(got, "delete") {
			t.Errorf("a Service was deleted with the directory:\n%s", got)
		}
	}
}

func TestRunLinkToDirectorySwitched(t *testing.T) {
	base := t.TempDir()
	for n := 1; n <= 2; n++ {
		v := filepath.Join(base, fmt.Sprintf("v%d", n))
		if err := os.Mkdir(v, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(v, "a.yaml"), service("a", n))
	}
	link := func(to string) {
		if err := os.Symlink(to, filepath.Join(base, "tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(base, "tmp"), filepath.Join(base, "current")); err != nil {
			t.Fatal(err)
		}
	}
	link("v1")
	rec := newRecorder()
	run(t, New(filepath.Join(base, "current"), rec, rec, Options{Rescan: time.Hour}), true)
	rec.waitFor(t, "nodes synced")
	link("v2")
	rec.waitFor(t, "update service default/a 10.96.0.2")
	write(t, filepath.Join(base, "v2", "a.yaml"), service("a", 3))
	rec.waitFor(t, "update service default/a 10.96.0.3")
}

// Where there are no watches, reading again has to do.
func TestRunRescans(t *testing.T) {
	dir := t.TempDir()
	clock := clocktesting.NewFakeClock(time.Now())
	rec := newRecorder()
	s := New(dir, rec, rec, Options{Rescan: time.Minute, Clock: clock})
	run(t, s, false)
	rec.waitFor(t, "nodes synced")
	if got := rec.news(); !strings.Contains(got[0], "cannot watch the manifest directory (no watches for this test), reading it every 1m0s") {
		t.Errorf("not reported: %q", got)
	}
	write(t, filepath.Join(dir, "a.yaml"), service("a", 1))
	stepUntil(t, clock, time.Minute, rec, "add service default/a 10.96.0.1")
	if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	stepUntil(t, clock, time.Minute, rec, "delete service default/a")
}

// stepUntil moves a clock until the line is recorded: each time the source
// waits for it.
func stepUntil(t *testing.T, clock *clocktesting.FakeClock, d time.Duration, rec *recorder, line string) {
	t.Helper()
	for end := time.Now().Add(deadline); time.Now().Before(end); {
		rec.mu.Lock()
		found, changed := slices.Contains(rec.lines, line), rec.changed
		rec.mu.Unlock()
		if found {
			return
		}
		if clock.HasWaiters() {
			clock.Step(d)
		}
		select {
		case <-changed:
		case <-time.After(time.Millisecond):
		}
	}
	t.Fatalf("timed out waiting for %q", line)
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a.yaml"), service("a", 1)+"---\nkind: [\n")
	rec := newRecorder()
	if err := New(dir, rec, rec, Options{}).Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"add service default/a 10.96.0.1",
		"problem InvalidFile File /" + dir + "/a.yaml [] a.yaml:11: not valid YAML: did not find expected node content",
		"services synced", "slices synced", "nodes synced",
	}
	if diff := cmp.Diff(want, rec.news()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := New(filepath.Join(dir, "nowhere"), rec, rec, Options{}).Load(t.Context()); err == nil {
		t.Error("no error without a directory")
	}
}

func TestRunErrors(t *testing.T) {
	base := t.TempDir()
	file := filepath.Join(base, "file")
	write(t, file, "")
	for _, test := range []struct{ dir, want string }{
		{filepath.Join(base, "missing"), "does not exist: create it"},
		{file, "is not a directory"},
	} {
		rec := newRecorder()
		err := New(test.dir, rec, rec, Options{}).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), test.dir) {
			t.Errorf("%s: %v", test.dir, err)
		}
		if got := rec.news(); got != nil {
			t.Errorf("%s: the handler was told %q", test.dir, got)
		}
	}
}

func TestRunEndsBeforeSynced(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a.yaml"), service("a", 1))
	rec := newRecorder()
	if err := New(dir, rec, nil, Options{}).Run(ctx); err != nil {
		t.Fatal(err)
	}
	if got := rec.news(); got != nil {
		t.Errorf("the handler was told %q", got)
	}
}
