// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
)

// Options of a Source. The zero value is ready to use.
type Options struct {
	// NodeName is the node whose Node object is delivered. Empty means none.
	NodeName string
	// OnServiceCIDR is told of every ServiceCIDR with its ranges, and without
	// any once it is gone; nil for nobody.
	OnServiceCIDR func(name string, cidrs []string)
	// Debounce is how long it must be quiet after a change before the
	// directory is read, so that one burst is one pass. It is what a change
	// costs at least, hence short: 5 ms unless set. A burst that does not end
	// is read every ten times as long.
	Debounce time.Duration
	// Settle is how long a file must stay as it is before an object missing
	// from it is deleted and what is wrong with it is reported. It covers
	// editors that write in place or move the old file away first. 50 ms unless set.
	Settle time.Duration
	// Rescan is how often the directory is read without a sign of change: for
	// links to elsewhere, network file systems, and hosts that are out of
	// inotify watches. 30 s unless set.
	Rescan time.Duration
	// Clock defaults to the real one.
	Clock clock.Clock
}

// Source is a directory as a source of objects.
type Source struct {
	dir      string
	handler  proxier.Handler
	reporter proxier.Reporter
	opts     Options
	clock    clock.Clock

	// newWatcher is replaced by tests that do without.
	newWatcher func() (*fsnotify.Watcher, error)
	watcher    *fsnotify.Watcher
	// watched is the directory as it was when the watch was set; nil when there
	// is none.
	watched os.FileInfo

	files   map[string]*file
	entries map[key]*entry
	// dirProblem and watchProblem are what was last reported of the directory.
	dirProblem   string
	watchProblem string
	synced       bool
}

// New builds a Source that feeds handler from dir once it runs, and takes what
// is wrong with the files to reporter.
func New(dir string, handler proxier.Handler, reporter proxier.Reporter, opts Options) *Source {
	if opts.Debounce == 0 {
		opts.Debounce = 5 * time.Millisecond
	}
	if opts.Settle == 0 {
		opts.Settle = 50 * time.Millisecond
	}
	if opts.Rescan == 0 {
		opts.Rescan = 30 * time.Second
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	if opts.OnServiceCIDR == nil {
		opts.OnServiceCIDR = func(string, []string) {}
	}
	return &Source{
		dir:        filepath.Clean(dir),
		handler:    handler,
		reporter:   reporter,
		opts:       opts,
		clock:      opts.Clock,
		newWatcher: fsnotify.NewWatcher,
		files:      map[string]*file{},
		entries:    map[key]*entry{},
	}
}

// Check says what is wrong with a directory that is to be read.
func Check(dir string) error {
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("manifest directory %s does not exist: create it (it may be empty) or name another one", dir)
	case err != nil:
		return fmt.Errorf("open manifest directory: %w", err)
	case !info.IsDir():
		return fmt.Errorf("manifest directory %s is not a directory: name the directory the manifests are in", dir)
	}
	return nil
}

// Load reads the directory once, tells the handler all that is in it, and that
// it is synced.
func (s *Source) Load(ctx context.Context) error {
	if err := Check(s.dir); err != nil {
		return err
	}
	if err := s.read(ctx); err != nil {
		return err
	}
	for _, f := range s.files {
		if f.dirty {
			return fmt.Errorf("read manifest %s: %w", f.name, errMoving)
		}
	}
	return nil
}

// read makes the first pass.
func (s *Source) read(ctx context.Context) error {
	if err := s.pass(ctx); err != nil {
		return fmt.Errorf("read manifest directory: %w", err)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.synced = true
	klog.FromContext(ctx).V(2).Info("Read the manifests", "directory", s.dir, "files", len(s.files), "objects", len(s.entries))
	s.handler.OnServiceSynced()
	s.handler.OnEndpointSlicesSynced()
	s.handler.OnNodeSynced()
	return nil
}

// Run reads the directory, tells the handler that it is synced, and follows
// changes until ctx ends. It fails only when there is no directory to begin
// with; what happens later is reported. All calls to the handler come from it.
// A Source runs once.
func (s *Source) Run(ctx context.Context) error {
	if s.synced {
		return errors.New("run manifest source: it has run already")
	}
	if err := Check(s.dir); err != nil {
		return err
	}

	var events chan fsnotify.Event
	var failures chan error
	watcher, err := s.newWatcher()
	if err != nil {
		s.unwatched(err)
	} else {
		s.watcher = watcher
		defer s.watcher.Close()
		events, failures = s.watcher.Events, s.watcher.Errors
		// The parent tells when the directory comes back or a link to it is
		// switched. Where that is not allowed, the next rescan finds out.
		if parent := filepath.Dir(s.dir); parent != s.dir {
			_ = s.watcher.Add(parent)
		}
	}

	if err := s.read(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}

	var burst, burstEnd time.Time // when to read after a change
	rescan := s.clock.Now().Add(s.opts.Rescan)
	timer := s.clock.NewTimer(s.opts.Rescan)
	defer timer.Stop()
	for {
		next := rescan
		for _, f := range s.files {
			next = earlier(next, f.settles)
		}
		next = earlier(next, earlier(burst, burstEnd))
		timer.Reset(next.Sub(s.clock.Now()))

		changed := false
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C():
		case event := <-events:
			changed = s.note(event)
		case err := <-failures:
			// Most likely an overflow of the kernel's queue: any file may have
			// changed.
			klog.FromContext(ctx).V(2).Info("Lost track of the manifest directory, reading all of it", "directory", s.dir, "err", err)
			for _, f := range s.files {
				f.dirty = true
			}
			s.watched, changed = nil, true
		}
		now := s.clock.Now()
		if changed {
			if burst.IsZero() {
				burstEnd = now.Add(10 * s.opts.Debounce)
			}
			burst = now.Add(s.opts.Debounce)
			continue
		}
		if now.Before(next) {
			continue // an event that is none of ours
		}
		burst, burstEnd = time.Time{}, time.Time{}
		if !now.Before(rescan) {
			rescan = now.Add(s.opts.Rescan)
		}
		s.directory(s.pass(ctx))
	}
}

// earlier is the earlier of two times, of which a zero one does not count.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// note takes an event and tells whether it asks for a pass.
func (s *Source) note(event fsnotify.Event) bool {
	path := filepath.Clean(event.Name)
	if path == s.dir {
		// The directory itself, seen from its parent or by itself.
		s.watched = nil
		return true
	}
	if filepath.Dir(path) != s.dir {
		return false // a neighbour of the directory
	}
	name := filepath.Base(path)
	if f := s.files[name]; f != nil {
		f.dirty = true
	}
	// "..data" is the link that the kubelet switches to update a volume.
	return isManifest(name) || strings.HasPrefix(name, "..")
}

// watch sets the watch, again if it is not on the directory any more.
func (s *Source) watch(info os.FileInfo) {
	if s.watcher == nil || s.watched != nil && os.SameFile(s.watched, info) {
		return
	}
	_ = s.watcher.Remove(s.dir) // a watch that went with the old directory
	if err := s.watcher.Add(s.dir); err != nil {
		s.unwatched(err)
		return
	}
	s.watched, s.watchProblem = info, ""
}

// unwatched reports, once, that changes are only found by reading again.
func (s *Source) unwatched(err error) {
	if message := err.Error(); message != s.watchProblem {
		s.watchProblem = message
		s.report(proxier.Problem{
			Kind: "File", Object: types.NamespacedName{Name: s.dir}, Reason: proxier.ReasonInvalidFile,
			Message: fmt.Sprintf("cannot watch the manifest directory (%v), reading it every %s instead; the limits of inotify are in /proc/sys/fs/inotify", err, s.opts.Rescan),
		})
	}
}

// directory reports what is wrong with the directory, once.
func (s *Source) directory(err error) {
	message := ""
	if err != nil {
		message = fmt.Sprintf("cannot read the manifest directory, keeping the last state: %v", err)
	}
	if message != "" && message != s.dirProblem {
		s.report(proxier.Problem{
			Kind: "File", Object: types.NamespacedName{Name: s.dir}, Reason: proxier.ReasonInvalidFile, Message: message,
		})
	}
	s.dirProblem = message
}

func (s *Source) report(p proxier.Problem) {
	if s.reporter != nil {
		s.reporter.Report(p)
	}
}
