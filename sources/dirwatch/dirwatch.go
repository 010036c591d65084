// SPDX-License-Identifier: Apache-2.0

// Package dirwatch says when something in a directory may have changed: soon where the
// kernel tells, also of ConfigMap volumes that are switched, and now and then anyway.
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
	// Wanted tells the names of files that matter.
	Wanted func(name string) bool
	// Unwatched is told, once for each reason, why changes are only found by looking again.
	Unwatched func(error)
	// Debounce is how long it must be quiet after a change, so that one burst is told
	// once. A burst that does not end is told every ten times as long.
	Debounce time.Duration
	// Rescan is how often to look without a sign of change: for links to elsewhere,
	// network file systems, and hosts that are out of inotify watches.
	Rescan time.Duration
	// Clock defaults to the real one.
	Clock clock.Clock
	// New makes a watcher; for tests that do without.
	New func() (*fsnotify.Watcher, error)
}

// Watcher watches a directory. It is not for concurrent use.
type Watcher struct {
	dir     string
	opts    Options
	watcher *fsnotify.Watcher // nil where there is none
	// watched is the directory as it was when the watch was set; nil when there is none.
	watched os.FileInfo
	problem string // told last
	rescan  time.Time
}

// Open makes a Watcher, which has to be closed. The directory need not exist. Where nothing
// can be watched, it goes by the clock.
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
	// The parent tells when the directory comes back or a link to it is switched. Where
	// that is not allowed, the next rescan finds out.
	if parent := filepath.Dir(w.dir); parent != w.dir {
		_ = w.watcher.Add(parent)
	}
	return w
}

// Close ends it.
func (w *Watcher) Close() {
	if w.watcher != nil {
		_ = w.watcher.Close()
	}
}

// Follow sets the watch, again if it is not on the directory any more. Who looks at the
// directory calls it first, with what stat says of it: what changes later is told.
func (w *Watcher) Follow(info os.FileInfo) {
	if w.watcher == nil || w.watched != nil && os.SameFile(w.watched, info) {
		return
	}
	_ = w.watcher.Remove(w.dir) // a watch that went with the old directory
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

// Change is what may be another.
type Change struct {
	// Names of files that were told of.
	Names map[string]struct{}
	// All says that it may be any file.
	All bool
}

// Next waits until it is time to look at the directory: after a burst of changes, for a
// rescan, or at a moment of the caller's, unless that is zero. It returns false once ctx is
// done.
func (w *Watcher) Next(ctx context.Context, at time.Time) (Change, bool) {
	var events chan fsnotify.Event
	var failures chan error
	if w.watcher != nil {
		events, failures = w.watcher.Events, w.watcher.Errors
	}
	change := Change{Names: map[string]struct{}{}}
	var burst, burstEnd time.Time // when to look after a change
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
			// Most likely an overflow of the kernel's queue: any file may have changed.
			klog.FromContext(ctx).V(2).Info("Lost track of a directory, looking at all of it", "directory", w.dir, "err", err)
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
			continue // an event that is none of ours
		}
		if !now.Before(w.rescan) {
			w.rescan = now.Add(w.opts.Rescan)
		}
		return change, true
	}
}

// note takes an event and tells whether it asks for a look.
func (w *Watcher) note(event fsnotify.Event, change *Change) bool {
	path := filepath.Clean(event.Name)
	if path == w.dir {
		// The directory itself, seen from its parent or by itself.
		w.watched = nil
		return true
	}
	if filepath.Dir(path) != w.dir {
		return false // a neighbour of the directory
	}
	name := filepath.Base(path)
	// "..data" is the link that the kubelet switches to update a volume.
	if !w.opts.Wanted(name) && !strings.HasPrefix(name, "..") {
		return false
	}
	change.Names[name] = struct{}{}
	return true
}

// Earlier is the earlier of two times, of which a zero one does not count.
func Earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
