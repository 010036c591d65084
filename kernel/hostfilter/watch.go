// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hostfilter

import (
	"context"
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
	// keepTime is how long rules count after they have gone. A firewall that reloads removes its
	// rules and adds them again.
	keepTime = 10 * time.Second
)

// Watcher follows the rules of a network namespace.
type Watcher struct {
	// In runs a function on a thread in the network namespace; nil means that of the process.
	In func(func() error) error

	// The rules were read at a generation of nf_tables and a time, zero for never; not all of
	// them if that failed.
	generation uint32
	readAt     time.Time
	failed     error
	current    Filters
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

// Look returns what there is, sorted, with what went in the last seconds. It reads rules if they may
// have changed. With an error, it returns what was known before, too.
func (w *Watcher) Look(ctx context.Context) (Filters, error) {
	now := time.Now()
	err := w.update(ctx, now)
	all := Filters{slices.Clone(w.current.BeforeDNAT), slices.Clone(w.current.Firewalls)}
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
	slices.SortStableFunc(all.Firewalls, func(a, b Firewall) int { return strings.Compare(a.Where, b.Where) })
	all.Firewalls = slices.CompactFunc(all.Firewalls, func(a, b Firewall) bool { return a.Where == b.Where })
	return all, err
}

func (w *Watcher) update(ctx context.Context, now time.Time) error {
	var read Filters
	unchanged := false
	err := w.in(func() (err error) {
		generation, _ := nftables.Generation() // 0 if it is unknown; then reading tells why
		again := now.Sub(w.readAt) >= rereadTime && (w.readAt.IsZero() || w.failed != nil || hasLegacy())
		if unchanged = generation == w.generation && !again; unchanged {
			return w.failed
		}
		read, err = Read(ctx)
		w.generation, w.readAt, w.failed = generation, now, err
		return err
	})
	switch {
	case unchanged:
	case err != nil: // some are missing
		for _, r := range read.BeforeDNAT {
			if !slices.ContainsFunc(w.current.BeforeDNAT, r.equal) {
				w.current.BeforeDNAT = append(w.current.BeforeDNAT, r)
			}
		}
		for _, f := range read.Firewalls {
			if !slices.ContainsFunc(w.current.Firewalls, func(o Firewall) bool { return o.key() == f.key() }) {
				w.current.Firewalls = append(w.current.Firewalls, f)
			}
		}
	default:
		w.replace(read, now)
	}
	return err
}

// replace takes over what was read.
func (w *Watcher) replace(read Filters, now time.Time) {
	if w.gone == nil {
		w.gone = map[string]leaving{}
	}
	for _, r := range w.current.BeforeDNAT {
		w.gone[r.key()] = leaving{rule: r, since: now}
	}
	for _, f := range w.current.Firewalls {
		w.gone[f.key()] = leaving{firewall: &f, since: now}
	}
	for _, r := range read.BeforeDNAT {
		delete(w.gone, r.key())
	}
	for _, f := range read.Firewalls {
		delete(w.gone, f.key())
	}
	w.current = read
}

// key is what a rule drops: one that was added again has another number. A firewall is where it is.
func (r Rule) key() string     { return "rule " + r.Match.String() }
func (f Firewall) key() string { return "firewall " + f.Where }

func (f *Filters) equal(o Filters) bool {
	return slices.EqualFunc(f.BeforeDNAT, o.BeforeDNAT, Rule.equal) &&
		slices.EqualFunc(f.Firewalls, o.Firewalls, func(a, b Firewall) bool { return a.equal(b) })
}

// equal says that they drop the same.
func (r Rule) equal(o Rule) bool { return r.key() == o.key() }
