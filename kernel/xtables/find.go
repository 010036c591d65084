// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// hints are chains of the table mangle that kubelet makes to show the variant it uses.
var hints = []string{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"}

// Find returns the programs of the variant that other programs on this node use: the one in
// which kubelet has left a hint, else the one with more foreign rules, else that of the plain
// command.
func Find(ctx context.Context) (*Tools, error) { return find(ctx, searchPath()) }

// FindIn is Find for the programs in one directory.
func FindIn(ctx context.Context, dir string) (*Tools, error) { return find(ctx, []string{dir}) }

func find(ctx context.Context, dirs []string) (*Tools, error) {
	var all, found []*Tools
	var rules []int
	var errs []error
	for _, v := range []Variant{NFT, Legacy} {
		t, err := newTools(v, dirs, lockWait)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if t.hinted() {
			return t, nil
		}
		all = append(all, t)
	}
	for _, t := range all {
		n, err := t.survey(ctx)
		if err := ctx.Err(); err != nil {
			return nil, err // survey may have been cut short
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		found, rules = append(found, t), append(rules, n)
	}
	switch {
	case len(found) == 0:
		return nil, fmt.Errorf("find the variant of iptables: %w", errors.Join(errs...))
	case len(found) == 1:
		return found[0], nil
	case rules[0] > rules[1]:
		return found[0], nil
	case rules[0] < rules[1]:
		return found[1], nil
	}
	return found[preferred(dirs)], nil // both exist, in order
}

// hinted looks for hints only: reading all rules that a proxy has left may take seconds.
// Where this fails, survey fails, too.
func (t *Tools) hinted() bool {
	for f := range inet.Families {
		p := t.families[f]
		if p.missing != nil || t.variant == Legacy && !hasLegacyTable(f, "mangle") {
			continue
		}
		for _, hint := range hints {
			if exists, err := p.single.ChainExists("mangle", hint); err == nil && exists {
				return true
			}
		}
	}
	return false
}

// hasLegacyTable reports whether a table exists. The legacy programs would create it.
func hasLegacyTable(f inet.Family, table string) bool {
	names := [inet.Families]string{"ip_tables_names", "ip6_tables_names"}
	text, err := os.ReadFile("/proc/thread-self/net/" + names[f])
	return err == nil && slices.Contains(strings.Fields(string(text)), table)
}

// survey counts foreign rules. It reads all existing tables, and none by name.
func (t *Tools) survey(ctx context.Context) (rules int, err error) {
	var errs []error
	read := false
	for f := range inet.Families {
		if t.families[f].missing != nil {
			continue
		}
		tables, err := t.save(ctx, f)
		if err != nil {
			// A kernel without IPv6 may have no tables of it either.
			errs = append(errs, err)
			continue
		}
		read = true
		for _, table := range tables {
			rules += foreign(table)
		}
	}
	if !read {
		return 0, errors.Join(errs...)
	}
	return rules, nil
}

// foreign counts rules, except those in chains of Kubernetes and those that jump to them: such
// chains may be leftovers of a kube-proxy that used this variant before.
func foreign(t *Table) (n int) {
	for _, c := range t.Chains {
		if strings.HasPrefix(c.Name, "KUBE-") {
			continue
		}
		for _, rule := range c.Rules {
			if !strings.Contains(rule, "-j KUBE-") {
				n++
			}
		}
	}
	return n
}

// preferred returns the variant of the plain command. Systems without that command are new, and
// those use nf_tables.
func preferred(dirs []string) Variant {
	for f := range inet.Families {
		path, err := lookUp(dirs, plain(f))
		if err != nil {
			continue
		}
		if v, err := variantOf(path); err == nil {
			return v
		}
	}
	return NFT
}
