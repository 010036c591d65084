// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hostfilter

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/nftables"
)

const (
	// pollTime is how often the generation of nf_tables is asked for: one small message.
	pollTime = time.Second
	// rereadTime is how often rules are read without another generation of nf_tables: where there
	// are tables of the legacy iptables, which count no changes, or some could not be read.
	rereadTime = 10 * time.Second
	// unreadTime is how long reading has to fail until it counts that there may be rules that are not known.
	unreadTime = 5 * time.Second
	// keepTime is how long rules count after they have gone. A firewall that reloads removes its
	// rules and adds them again.
	keepTime = 10 * time.Second
)

// Watcher follows the rules of a network namespace.
type Watcher struct {
	// In runs a function on a thread in the network namespace; nil means that of the process.
	In func(func() error) error

	read func(context.Context) ([sources]Filters, [sources]error) // readSources if nil, for tests

	// The rules were read at a generation of nf_tables and a time, zero for never; not all of
	// them if that failed.
	generation uint32
	readAt     time.Time
	failed     error
	failing    time.Time // since when Look fails; zero if it does not
	unread     string    // why, once that lasts: one text, as a fact that changes has all decisions made again
	current    [sources]Filters
	gone       map[string]leaving // by what they match
}

func (w *Watcher) in(fn func() error) error {
	if w.In != nil {
		return w.In(fn)
	}
	return fn()
}

// leaving is a rule or firewall that has gone.
type leaving struct {
	rule     Rule
	firewall *Firewall // nil for a rule
	since    time.Time
}

// Watch calls tell with what there is, first and whenever it changes, until ctx is done. Rules and
// firewalls that go count for some seconds more. What cannot be read is logged once, and tried again.
func (w *Watcher) Watch(ctx context.Context, tell func(Filters)) {
	ticker := time.NewTicker(pollTime)
	defer ticker.Stop()
	var told Filters
	first, failed := true, false
	for {
		now, err := w.Look(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil && !failed:
			klog.FromContext(ctx).Error(err, "Cannot read all rules that filter packets of Services; retrying")
		}
		failed = err != nil
		if first || !now.equal(told) {
			first, told = false, now
			tell(now)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// Await returns what there is, as Look does, once all could be read or Unread says why not.
func (w *Watcher) Await(ctx context.Context) (Filters, error) {
	for {
		all, err := w.Look(ctx)
		if err == nil || all.Unread != "" {
			return all, err
		}
		select {
		case <-ctx.Done():
			return all, err
		case <-time.After(pollTime):
		}
	}
}

// Look returns what there is, sorted, with what went in the last seconds. It reads rules if they may
// have changed. With an error, it returns what was known before, too.
func (w *Watcher) Look(ctx context.Context) (Filters, error) {
	now := time.Now()
	err := w.update(ctx, now)
	switch {
	case err == nil:
		w.failing, w.unread = time.Time{}, ""
	case w.failing.IsZero():
		w.failing = now
	}
	var all Filters
	for _, f := range w.current {
		all.BeforeDNAT = append(all.BeforeDNAT, f.BeforeDNAT...)
		all.Firewalls = append(all.Firewalls, f.Firewalls...)
	}
	for text, l := range w.gone {
		switch {
		case now.Sub(l.since) >= keepTime:
			delete(w.gone, text)
		case l.firewall != nil:
			all.Firewalls = append(all.Firewalls, *l.firewall)
		default:
			all.BeforeDNAT = append(all.BeforeDNAT, l.rule)
		}
	}
	slices.SortStableFunc(all.BeforeDNAT, func(a, b Rule) int { return strings.Compare(a.key(), b.key()) })
	all.BeforeDNAT = slices.CompactFunc(all.BeforeDNAT, Rule.equal)
	if err != nil && w.lasts(now) {
		w.unread = cmp.Or(w.unread, strings.ReplaceAll(err.Error(), "\n", "; "))
		all.Unread = w.unread
	}
	slices.SortStableFunc(all.Firewalls, func(a, b Firewall) int { return strings.Compare(a.Where, b.Where) })
	all.Firewalls = slices.CompactFunc(all.Firewalls, func(a, b Firewall) bool { return a.Where == b.Where })
	return all, err
}

// lasts says that reading fails for so long that it is tried less often, and what is known is too old.
func (w *Watcher) lasts(now time.Time) bool { return now.Sub(w.failing) >= unreadTime }

func (w *Watcher) update(ctx context.Context, now time.Time) error {
	return w.in(func() error {
		generation, _ := nftables.Generation() // 0 if it is unknown; then reading tells why
		again := w.failed != nil && !w.lasts(now) || now.Sub(w.readAt) >= rereadTime && (w.readAt.IsZero() || w.failed != nil || hasLegacy())
		if generation == w.generation && !again {
			return w.failed
		}
		reader := w.read
		if reader == nil {
			reader = readSources
		}
		read, errs := reader(ctx)
		w.generation, w.readAt, w.failed = generation, now, errors.Join(errs[:]...)
		for i := range read {
			if errs[i] != nil {
				w.current[i].add(read[i]) // some are missing
			} else {
				w.replace(&w.current[i], read[i], now)
			}
		}
		return w.failed
	})
}

// add adds what is not there yet.
func (f *Filters) add(more Filters) {
	for _, r := range more.BeforeDNAT {
		if !slices.ContainsFunc(f.BeforeDNAT, r.equal) {
			f.BeforeDNAT = append(f.BeforeDNAT, r)
		}
	}
	for _, o := range more.Firewalls {
		if !slices.ContainsFunc(f.Firewalls, func(known Firewall) bool { return known.key() == o.key() }) {
			f.Firewalls = append(f.Firewalls, o)
		}
	}
}

// replace takes over what was read of one source.
func (w *Watcher) replace(current *Filters, read Filters, now time.Time) {
	if w.gone == nil {
		w.gone = map[string]leaving{}
	}
	for _, r := range current.BeforeDNAT {
		if !slices.ContainsFunc(read.BeforeDNAT, r.equal) {
			w.gone[r.key()] = leaving{rule: r, since: now}
		}
	}
	for _, f := range current.Firewalls {
		if !slices.ContainsFunc(read.Firewalls, func(o Firewall) bool { return o.key() == f.key() }) {
			w.gone[f.key()] = leaving{firewall: &f, since: now}
		}
	}
	for _, r := range read.BeforeDNAT {
		delete(w.gone, r.key())
	}
	for _, f := range read.Firewalls {
		delete(w.gone, f.key())
	}
	*current = read
}

// key is what a rule drops: one that was added again has another number. A firewall is where it is.
func (r Rule) key() string     { return "rule " + r.Match.String() }
func (f Firewall) key() string { return "firewall " + f.Where }

func (f *Filters) equal(o Filters) bool {
	return f.Unread == o.Unread && slices.EqualFunc(f.BeforeDNAT, o.BeforeDNAT, Rule.equal) &&
		slices.EqualFunc(f.Firewalls, o.Firewalls, func(a, b Firewall) bool { return a.equal(b) })
}

// equal says that they drop the same.
func (r Rule) equal(o Rule) bool { return r.key() == o.key() }
