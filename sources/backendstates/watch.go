// SPDX-License-Identifier: Apache-2.0

//go:build linux

package backendstates

import (
	"context"
	"os"
	"slices"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/sources/dirwatch"
)

const (
	// debounce is shorter than an operator notices. Files are replaced at once.
	debounce = 5 * time.Millisecond
	rescan   = 10 * time.Second
)

// Watch tells the entries that are in force whenever they have changed, until ctx is done. known are those that the caller
// knows. While the file is not valid, the entries stay that were known before, until they end.
func Watch(ctx context.Context, dir string, clock clock.Clock, known []Entry, tell func([]Entry)) {
	logger := klog.FromContext(ctx)
	w := dirwatch.Open(dir, dirwatch.Options{
		Wanted:    func(name string) bool { return name == FileName },
		Unwatched: func(error) {}, // the rescan has to do
		Debounce:  debounce, Rescan: rescan, Clock: clock,
	})
	defer w.Close()
	problem := ""
	for ok := true; ok; {
		if info, err := os.Stat(dir); err == nil {
			w.Follow(info)
		}
		now := clock.Now()
		list, err := Load(dir, now)
		if err != nil {
			if err.Error() != problem {
				logger.Error(err, "Cannot read the states of backends; those that are known stay")
				problem = err.Error()
			}
			list = slices.DeleteFunc(slices.Clone(known), func(e Entry) bool { return !e.Until.IsZero() && !e.Until.After(now) })
		} else {
			problem = ""
		}
		if !slices.EqualFunc(list, known, func(a, b Entry) bool { return a.equal(&b) }) {
			known = list
			tell(list)
		}
		var next time.Time
		for i := range list {
			next = dirwatch.Earlier(next, list[i].Until)
		}
		_, ok = w.Next(ctx, next)
	}
}

func (e *Entry) equal(o *Entry) bool {
	return e.Same(o) && e.State == o.State && e.Since.Equal(o.Since) && e.Until.Equal(o.Until)
}
