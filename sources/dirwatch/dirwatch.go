// SPDX-License-Identifier: Apache-2.0

// Package dirwatch watches a directory for changes. It uses inotify, including for updates of
// ConfigMap volumes, and also reports a possible change at regular intervals.
package dirwatch

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Options of a Watcher.
type Options struct {
	// Wanted reports whether changes of a file matter, by its name.
	Wanted func(name string) bool
	// Unwatched is called once for each reason why the directory cannot be watched.
	Unwatched func(error)
	// Debounce is how long no change may occur before a change is reported, so that a
	// burst is reported once. A longer burst is reported every ten times Debounce.
	Debounce time.Duration
	// Rescan is the interval of reports without a notification: for links to other
	// directories, network file systems, and hosts without free inotify watches.
	Rescan time.Duration
	// Clock defaults to the real one.
	Clock clock.Clock
	// New makes a watcher; it is set by tests.
	New func() (*fsnotify.Watcher, error)
}

// Watcher watches a directory. It is not for concurrent use.
type Watcher struct {
	dir     string
	opts    Options
	watcher *fsnotify.Watcher // nil if inotify is not available
	// watched identifies the directory that has the watch; nil if none has.
	watched os.FileInfo
	problem string // the last one passed to Unwatched
	rescan  time.Time
}

// Open makes a Watcher. The caller closes it. The directory need not exist. If it cannot be
// watched, the Watcher reports possible changes at regular intervals only.
func Open(dir string, opts Options) *Watcher {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	if opts.New == nil {
		opts.New = fsnotify.NewWatcher
	}
	w := &Watcher{dir: filepath.Clean(dir), opts: opts, rescan: opts.Clock.Now().Add(opts.Rescan)}
	watcher, err := opts.New()
	if err != nil {
		w.unwatched(err)
		return w
	}
	w.watcher = watcher
	// Watching the parent shows when the directory is recreated or a link to it changes.
	// If that is not allowed, the next rescan shows it.
	if parent := filepath.Dir(w.dir); parent != w.dir {
		_ = w.watcher.Add(parent)
	}
	return w
}

// Close stops watching.
func (w *Watcher) Close() {
	if w.watcher != nil {
		_ = w.watcher.Close()
	}
}

// Follow sets the watch, if the directory is not the watched one already. Callers call it with the
// result of stat before they read the directory, so that no later change is missed.
func (w *Watcher) Follow(info os.FileInfo) {
	if w.watcher == nil || w.watched != nil && os.SameFile(w.watched, info) {
		return
	}
	_ = w.watcher.Remove(w.dir) // the watch of a previous directory
	if err := w.watcher.Add(w.dir); err != nil {
		w.unwatched(err)
		return
	}
	w.watched, w.problem = info, ""
}

func (w *Watcher) unwatched(err error) {
	if message := err.Error(); message != w.problem {
		w.problem = message
		w.opts.Unwatched(err)
	}
}

// Change lists the files that may have changed.
type Change struct {
	// Names are the files with notifications.
	Names map[string]struct{}
	// All means that any file may have changed.
	All bool
}

// Next waits until the directory should be read: after a burst of changes, for a rescan, or at the
// given time, unless that is zero. It returns false once ctx is done.
func (w *Watcher) Next(ctx context.Context, at time.Time) (Change, bool) {
	var events chan fsnotify.Event
	var failures chan error
	if w.watcher != nil {
		events, failures = w.watcher.Events, w.watcher.Errors
	}
	change := Change{Names: map[string]struct{}{}}
	var burst, burstEnd time.Time // when to return after a change
	timer := w.opts.Clock.NewTimer(w.opts.Rescan)
	defer timer.Stop()
	for {
		next := Earlier(Earlier(w.rescan, at), Earlier(burst, burstEnd))
		timer.Reset(next.Sub(w.opts.Clock.Now()))
		changed := false
		select {
		case <-ctx.Done():
			return Change{}, false
		case <-timer.C():
		case event := <-events:
			changed = w.note(event, &change)
		case err := <-failures:
			// Probably an overflow of the kernel's queue: any file may have changed.
			klog.FromContext(ctx).V(2).Info("Lost notifications about a directory, reading all of it", "directory", w.dir, "err", err)
			w.watched, change.All, changed = nil, true, true
		}
		now := w.opts.Clock.Now()
		if changed {
			if burst.IsZero() {
				burstEnd = now.Add(10 * w.opts.Debounce)
			}
			burst = now.Add(w.opts.Debounce)
			continue
		}
		if now.Before(next) {
			continue // an irrelevant event
		}
		if !now.Before(w.rescan) {
			w.rescan = now.Add(w.opts.Rescan)
		}
		return change, true
	}
}

// note records an event and reports whether it is relevant.
func (w *Watcher) note(event fsnotify.Event, change *Change) bool {
	path := filepath.Clean(event.Name)
	if path == w.dir {
		// The directory itself, reported by its parent's watch or its own.
		w.watched = nil
		return true
	}
	if filepath.Dir(path) != w.dir {
		return false // another file in the parent directory
	}
	name := filepath.Base(path)
	// The kubelet updates a volume by changing the link "..data".
	if !w.opts.Wanted(name) && !strings.HasPrefix(name, "..") {
		return false
	}
	change.Names[name] = struct{}{}
	return true
}

// Earlier returns the earlier of two times. It ignores zero times.
func Earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
