// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/pflag"
)

// watchFlags are those of commands that can go on showing changes.
type watchFlags struct {
	watch    bool
	interval time.Duration
}

func (f *watchFlags) add(fs *pflag.FlagSet) {
	fs.BoolVarP(&f.watch, "watch", "w", false, "go on, and show what is new, changed or ended")
	fs.DurationVar(&f.interval, "interval", time.Second, "time between two looks with --watch")
}

func (f *watchFlags) check() error {
	if f.interval <= 0 {
		return usagef("--interval has to be above 0, not %v", f.interval)
	}
	return nil
}

// watched is a row of a list.
type watched struct {
	key     string // what stays the same
	version string // what is worth an event when it changes
	cells   []string
	object  any
}

// What happened to a row since the last look.
const (
	eventPresent = "present" // it was there at the first look
	eventNew     = "new"
	eventChanged = "changed"
	eventEnded   = "ended"
)

// watchEvent is what happened to a row.
type watchEvent struct {
	Time   time.Time `json:"time"`
	Event  string    `json:"event"`
	Object any       `json:"object"`
	cells  []string
}

// listing is a list that a command shows once, or watches.
type listing struct {
	kind string // of the object that has the list
	head []string
	none string // said in place of a table without rows, if it is not empty
	look func(context.Context) (rows []watched, object any, err error)
}

func (a *app) showList(ctx context.Context, f *watchFlags, l listing) error {
	if err := f.check(); err != nil {
		return err
	}
	if f.watch {
		return a.watchList(ctx, f, l.head, func(ctx context.Context) ([]watched, error) {
			rows, _, err := l.look(ctx)
			return rows, err
		})
	}
	rows, object, err := l.look(ctx)
	switch {
	case err != nil:
		return err
	case a.isData():
		return a.writeData(l.kind, object)
	case len(rows) == 0 && l.none != "":
		_, err := fmt.Fprintln(a.out, l.none)
		return err
	}
	t := newTable(a.tables(), l.head...)
	for i := range rows {
		t.row(rows[i].cells...)
	}
	return t.flush()
}

// watchList shows a list, and its changes until ctx is done or something fails.
func (a *app) watchList(ctx context.Context, f *watchFlags, head []string, look func(context.Context) ([]watched, error)) error {
	write := a.eventWriter(head)
	var known map[string]watched
	for {
		list, err := look(ctx)
		if err != nil {
			return err
		}
		if err := write(eventsBetween(known, list, a.now().UTC())); err != nil {
			return err
		}
		known = make(map[string]watched, len(list))
		for _, row := range list {
			known[row.key] = row
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(f.interval):
		}
	}
}

// eventsBetween compares two looks; known is nil before the first one.
func eventsBetween(known map[string]watched, list []watched, at time.Time) (events []watchEvent) {
	present := map[string]bool{}
	for _, row := range list {
		present[row.key] = true
		before, ok := known[row.key]
		event := eventPresent
		switch {
		case known == nil:
		case !ok:
			event = eventNew
		case before.version != row.version:
			event = eventChanged
		default:
			continue
		}
		events = append(events, watchEvent{at, event, row.object, row.cells})
	}
	var ended []watched
	for key, row := range known {
		if !present[key] {
			ended = append(ended, row)
		}
	}
	slices.SortFunc(ended, func(x, y watched) int { return strings.Compare(x.key, y.key) })
	for _, row := range ended {
		events = append(events, watchEvent{at, eventEnded, row.object, row.cells})
	}
	return events
}

// eventWriter writes a row or an object for each event.
func (a *app) eventWriter(head []string) func([]watchEvent) error {
	if a.isData() {
		return func(events []watchEvent) error {
			for i := range events {
				if err := a.writeStream("WatchEvent", &events[i]); err != nil {
					return err
				}
			}
			return nil
		}
	}
	stream := a.newStream(append([]string{"TIME", "EVENT"}, head...))
	return func(events []watchEvent) error {
		var rows [][]string
		for i := range events {
			rows = append(rows, append([]string{events[i].Time.Format(time.TimeOnly), events[i].Event}, events[i].cells...))
		}
		return stream(rows...)
	}
}

// newStream writes rows as they come, with columns as wide as they have been so far.
func (a *app) newStream(head []string) func(rows ...[]string) error {
	var widths []int
	out := rowsOf(a.tables())
	return func(rows ...[]string) error {
		if widths == nil {
			widths = make([]int, len(head))
			rows = append([][]string{head}, rows...)
		}
		for _, row := range rows {
			for i := range row {
				row[i] = cmp.Or(row[i], "-")
				widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
			}
		}
		for _, row := range rows {
			var line strings.Builder
			for i, cell := range row {
				fmt.Fprintf(&line, "%-*s  ", widths[i], cell)
			}
			if _, err := io.WriteString(out, strings.TrimRight(line.String(), " ")+"\n"); err != nil {
				return err
			}
		}
		return nil
	}
}
