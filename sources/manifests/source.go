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
	// OnServiceCIDR is called with every ServiceCIDR and its ranges, and without ranges
	// when it is deleted. It may be nil.
	OnServiceCIDR func(name string, cidrs []string)
	// Debounce is how long no change may occur before the directory is read, so that a
	// burst causes one pass. It delays every change, so it is short: 5 ms unless set. In
	// a longer burst, the directory is read every ten times Debounce.
	Debounce time.Duration
	// Settle is how long a file must be unchanged before objects missing from it are
	// deleted and its problems are reported. It covers editors that write in place or
	// move the old file away first. 50 ms unless set.
	Settle time.Duration
	// Rescan is how often the directory is read without a notification: for links to
	// other directories, network file systems, and hosts without free inotify watches.
	// 30 s unless set.
	Rescan time.Duration
	// Clock defaults to the real one.
	Clock clock.Clock
}

// Source reads objects from a directory.
type Source struct {
	dir      string
	handler  proxier.Handler
	reporter proxier.Reporter
	opts     Options
	clock    clock.Clock

	// newWatcher is set by tests.
	newWatcher func() (*fsnotify.Watcher, error)
	watcher    *dirwatch.Watcher // nil until it runs

	files   map[string]*file
	entries map[key]*entry
	// dirProblem is the last reported problem of the directory.
	dirProblem string
	synced     bool
}

// New builds a Source that calls handler with the objects in dir while it runs, and reports
// problems of the files to reporter.
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

// Check returns an error if dir is not a readable directory.
func Check(dir string) error {
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("manifest directory %s does not exist: create it (it may be empty) or choose another one", dir)
	case err != nil:
		return fmt.Errorf("open manifest directory: %w", err)
	case !info.IsDir():
		return fmt.Errorf("manifest directory %s is not a directory: choose the directory with the manifests", dir)
	}
	return nil
}

// Load reads the directory once and passes all objects to the handler, which is synced then.
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

// Run reads the directory, calls the handler's synced methods, and watches for changes until ctx
// ends. It fails only if the directory does not exist at the start. Later problems are reported.
// It makes all calls to the handler. A Source runs once.
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
		var stableAt time.Time
		for _, f := range s.files {
			stableAt = dirwatch.Earlier(stableAt, f.stableAt)
		}
		change, ok := s.watcher.Next(ctx, stableAt)
		if !ok {
			return nil
		}
		for name, f := range s.files {
			_, changed := change.Names[name]
			f.dirty = f.dirty || changed || change.All
		}
		s.directory(s.pass(ctx))
	}
}

// unwatched reports that the directory cannot be watched.
func (s *Source) unwatched(err error) {
	s.report(proxier.Problem{
		Kind: "File", Object: types.NamespacedName{Name: s.dir}, Reason: proxier.ReasonInvalidFile,
		Message: fmt.Sprintf("cannot watch the manifest directory (%v), reading it every %s instead; see /proc/sys/fs/inotify for the limits of inotify", err, s.opts.Rescan),
	})
}

// directory reports a problem of the directory, once.
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
