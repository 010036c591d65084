// SPDX-License-Identifier: Apache-2.0

package dirwatch

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	clocktesting "k8s.io/utils/clock/testing"
)

// deadline bounds every wait; a test that passes never gets near it.
const deadline = 20 * time.Second

func isYAML(name string) bool { return filepath.Ext(name) == ".yaml" }

func follow(t *testing.T, w *Watcher, dir string) {
	t.Helper()
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	w.Follow(info)
}

func write(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
		t.Fatal(err)
	}
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

// told waits for one change and returns its names.
func told(t *testing.T, w *Watcher) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	change, ok := w.Next(ctx, time.Time{})
	if !ok {
		t.Fatal("timed out waiting for a change")
	}
	return strings.Join(slices.Sorted(maps.Keys(change.Names)), " ")
}

func TestNext(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "d")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	w := Open(dir, Options{Wanted: isYAML, Unwatched: func(err error) { t.Error(err) }, Debounce: 20 * time.Millisecond, Rescan: time.Hour})
	defer w.Close()
	follow(t, w, dir)

	write(t, base, "neighbour.yaml")
	write(t, dir, "unwanted.txt")
	write(t, dir, "b.yaml")
	write(t, dir, "a.yaml")
	if got := told(t, w); got != "a.yaml b.yaml" {
		t.Errorf("told of %q", got)
	}
	write(t, dir, "unwanted.txt")
	rename(t, filepath.Join(dir, "unwanted.txt"), filepath.Join(dir, "..data"))
	if got := told(t, w); got != "..data" {
		t.Errorf("after the switch of a volume: %q", got)
	}

	// Another directory takes its place, and is followed from then on.
	if err := os.Mkdir(filepath.Join(base, "new"), 0o700); err != nil {
		t.Fatal(err)
	}
	rename(t, dir, filepath.Join(base, "old"))
	if got := told(t, w); got != "" {
		t.Errorf("after the directory was moved away: %q", got)
	}
	rename(t, filepath.Join(base, "new"), dir)
	if got := told(t, w); got != "" {
		t.Errorf("after the directory was replaced: %q", got)
	}
	follow(t, w, dir)
	write(t, dir, "c.yaml")
	if got := told(t, w); got != "c.yaml" {
		t.Errorf("in the new directory: %q", got)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, ok := w.Next(ctx, time.Time{}); ok {
		t.Error("told of something after the end")
	}
	if change, ok := w.Next(t.Context(), time.Now()); !ok || len(change.Names) > 0 || change.All {
		t.Errorf("at a moment of the caller's: %+v, %v", change, ok)
	}
}

// Events that the kernel dropped may have been about anything.
func TestOverflow(t *testing.T) {
	dir := t.TempDir()
	w := Open(dir, Options{Wanted: isYAML, Unwatched: func(err error) { t.Error(err) }, Debounce: time.Millisecond, Rescan: time.Hour})
	defer w.Close()
	follow(t, w, dir)
	go func() { w.watcher.Errors <- fsnotify.ErrEventOverflow }()
	if change, ok := w.Next(t.Context(), time.Time{}); !ok || !change.All {
		t.Errorf("told %+v, %v", change, ok)
	}
	if w.watched != nil {
		t.Error("the watch counts as good")
	}
}

// Without the kernel's help there is the clock.
func TestRescan(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	var why []string
	w := Open(t.TempDir(), Options{
		Wanted: isYAML, Unwatched: func(err error) { why = append(why, err.Error()) }, Rescan: time.Minute, Clock: clock,
		New: func() (*fsnotify.Watcher, error) { return nil, errors.New("none left") },
	})
	defer w.Close()
	for range 2 {
		looked := make(chan struct{})
		go func() {
			defer close(looked)
			w.Next(t.Context(), time.Time{})
		}()
		for end := time.Now().Add(deadline); !clock.HasWaiters() && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		clock.Step(time.Minute)
		select {
		case <-looked:
		case <-time.After(deadline):
			t.Fatal("no look after the time for it")
		}
	}
	if got := strings.Join(why, "; "); got != "none left" {
		t.Errorf("told %q", got)
	}
}
