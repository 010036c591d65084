// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

const (
	// auditInterval is the time between two looks at whether other programs changed rules:
	// one netlink request, or a system call for each table.
	auditInterval = time.Second
	// auditRest limits the share of time in which rules are read because others changed
	// some: after reading took t, the next time is no sooner than auditRest*t later.
	auditRest = 50
	// maxRepairs is how often rules of a family are repaired within repairsMemory. Another
	// program that writes rules of the same names, such as a second kube-proxy, is not
	// fought beyond that; full syncs go on.
	maxRepairs    = 10
	repairsMemory = 10 * time.Minute
	// maxNamed is how many chains are named.
	maxNamed = 6
)

// sizer is implemented by tools whose kernel interface tells the sizes of tables: the legacy
// variant, which has no generation. Two equal texts mean that rules were hardly changed in
// between.
type sizer interface {
	Sizes(family proxier.Family, tables ...string) (text string, ok bool, err error)
}

// user is implemented by tools that tell how often a chain is used: the nft variant.
type user interface {
	Uses(family proxier.Family, chains ...xtables.ChainName) (text string, ok bool, err error)
}

// Run repairs rules that other programs delete or change, until ctx is done.
func (t *Tier) Run(ctx context.Context) {
	ticker := time.NewTicker(auditInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		t.audit(ctx)
	}
}

// audit compares the rules with the kernel if others changed some. What is wrong is written
// again, and told.
func (t *Tier) audit(ctx context.Context) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = t.netns.Do(func() error {
		for _, f := range t.rules.families {
			if f == nil || !f.whole || !f.isDue(time.Now()) {
				continue
			}
			start := time.Now()
			repaired, err := f.audit(ctx)
			f.auditAfter = time.Now().Add(auditRest * time.Since(start))
			if err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Cannot compare rules with the kernel after another program changed some; trying again with the next sync", "family", f.name)
			}
			if len(repaired) == 0 || err != nil {
				continue
			}
			f.repairs = append(f.repairs, start)
			if t.opts.Repaired != nil {
				t.opts.Repaired(proxier.Repair{State: proxier.RepairedRules, What: fmt.Sprintf("%s rules were deleted or changed; written again: %s", f.name, strings.Join(repaired, ", "))})
			}
		}
		return nil
	})
}

// isDue reports whether the rules are to be compared with the kernel: others changed some. The share
// of time for that is limited, unless it is certain that rules are missing, and so is the
// number of repairs.
func (f *family) isDue(now time.Time) bool {
	if !f.changedByOthers() {
		f.noteUses()
		return false
	}
	f.repairs = slices.DeleteFunc(f.repairs, func(at time.Time) bool { return now.Sub(at) >= repairsMemory })
	return len(f.repairs) < maxRepairs && (!now.Before(f.auditAfter) || f.usesDiffer())
}

// watched are chains that all Services depend on. Their uses change if a chain is emptied, or a
// jump to it removed.
var watched = []xtables.ChainName{
	{Table: "nat", Chain: servicesChain}, {Table: "nat", Chain: postroutingChain}, {Table: "nat", Chain: markMasqChain},
	{Table: "filter", Chain: servicesChain}, {Table: "filter", Chain: forwardChain}, {Table: "filter", Chain: proxyFirewallChain},
}

// noteUses remembers the uses of chains while all changes are this process's own.
func (f *family) noteUses() {
	if n, ok := f.watch.generation(); ok && (f.noted == "" || n != f.usesAt) {
		f.noted, f.usesAt = f.readUses(), n
	}
}

// usesDiffer reports whether chains have other uses than when they were last noted. What this process
// has written since counts too, which costs at most a needless comparison.
func (f *family) usesDiffer() bool {
	return f.noted != "" && f.readUses() != f.noted
}

func (f *family) readUses() string {
	u, is := f.opts.Tools.(user)
	if !is {
		return ""
	}
	text, ok, err := u.Uses(f.name, watched...)
	if !ok || err != nil {
		return ""
	}
	return text
}

// audit brings the kernel in line, and returns the chains that differed.
func (f *family) audit(ctx context.Context) (repaired []string, err error) {
	clear(f.wrote)
	defer f.observe()
	f.restored = map[string]struct{}{}
	defer func() { f.restored = nil }()
	err = f.syncAll(ctx)
	more := len(f.restored) - maxNamed
	for name := range f.restored {
		repaired = append(repaired, name)
	}
	slices.Sort(repaired)
	if more > 0 {
		repaired = append(repaired[:maxNamed], fmt.Sprintf("and %d more chains", more))
	}
	return repaired, err
}

// changedByOthers reports whether other programs may have changed rules since they were last read or
// written.
func (f *family) changedByOthers() bool {
	if _, ok := f.watch.generation(); ok {
		return !f.watch.unchanged(f.name)
	}
	now, ok := f.readSizes()
	return ok && now != f.sizes
}

func (f *family) readSizes() (text string, ok bool) {
	s, is := f.opts.Tools.(sizer)
	if !is {
		return "", false
	}
	text, ok, err := s.Sizes(f.name, tableOrder...)
	return text, ok && err == nil
}

// noteRestored remembers the chains of a text that the kernel has taken.
func (f *family) noteRestored(t *text) {
	if f.restored == nil {
		return
	}
	for name, part := range t.tables {
		for _, c := range part.declared {
			f.restored[name+" "+c] = struct{}{}
		}
		for _, b := range part.blocks {
			f.restored[name+" "+b.chain] = struct{}{}
		}
	}
}
