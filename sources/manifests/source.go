// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/dirwatch"
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
	watcher    *dirwatch.Watcher // nil until it runs

	files   map[string]*file
	entries map[key]*entry
	// dirProblem is what was last reported of the directory.
	dirProblem string
	synced     bool
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
		dir:      filepath.Clean(dir),
		handler:  handler,
		reporter: reporter,
		opts:     opts,
		clock:    opts.Clock,
		files:    map[string]*file{},
		entries:  map[key]*entry{},
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

	s.watcher = dirwatch.Open(s.dir, dirwatch.Options{
		Wanted: isManifest, Unwatched: s.unwatched, Debounce: s.opts.Debounce, Rescan: s.opts.Rescan, Clock: s.clock, New: s.newWatcher,
	})
	defer s.watcher.Close()

	if err := s.read(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}

	for {
		var settles time.Time
		for _, f := range s.files {
			settles = dirwatch.Earlier(settles, f.settles)
		}
		change, ok := s.watcher.Next(ctx, settles)
		if !ok {
			return nil
		}
		for name, f := range s.files {
			_, told := change.Names[name]
			f.dirty = f.dirty || told || change.All
		}
		s.directory(s.pass(ctx))
	}
}

// unwatched reports that changes are only found by reading again.
func (s *Source) unwatched(err error) {
	s.report(proxier.Problem{
		Kind: "File", Object: types.NamespacedName{Name: s.dir}, Reason: proxier.ReasonInvalidFile,
		Message: fmt.Sprintf("cannot watch the manifest directory (%v), reading it every %s instead; the limits of inotify are in /proc/sys/fs/inotify", err, s.opts.Rescan),
	})
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
