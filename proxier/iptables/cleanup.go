// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

// Cleanup removes every chain of modes iptables and ipvs, whether this proxy or upstream's
// wrote it, and the jumps to them. KUBE-FIREWALL stays: kubelet has one of that name. With
// keepEstablished, translated connections survive: while there are any, one chain stays, which no
// rule jumps to, with a rule that matches by conntrack. Without such a rule the kernel stops
// conntrack, and with it all translation. Where conntrack does not pick up established connections, that chain stays in any
// case: later rules, of any kube-proxy, would drop the packets of connections that conntrack has not seen begin.
func Cleanup(ctx context.Context, tools Tools, keepEstablished bool) error {
	var errs []error
	for family := range proxier.Families {
		if tools.Usable(ctx, family) != nil {
			continue // nothing can exist
		}
		mine := func(chain string) bool { return isOurs(chain) || chain == ipvsDrainChain && !keepEstablished }
		if err := cleanupFamily(ctx, tools, family, keepEstablished, mine); err != nil {
			errs = append(errs, fmt.Errorf("remove %s rules: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// HasChains reports whether tables have a chain of mode iptables or ipvs, whether this proxy or
// upstream's wrote it.
func HasChains(tables []*xtables.Table) bool {
	return slices.ContainsFunc(tables, func(t *xtables.Table) bool {
		return slices.ContainsFunc(t.Chains, func(c xtables.Chain) bool { return isOurs(c.Name) || c.Name == drainChain || c.Name == ipvsDrainChain })
	})
}

// CleanupIPVS removes the chains that only mode ipvs has, and the jumps to them. With draining, what
// MasqueradeIPVS wrote stays.
func CleanupIPVS(ctx context.Context, tools Tools, draining bool) error {
	var errs []error
	mine := func(chain string) bool { return slices.Contains(ofIPVS, chain) || chain == ipvsDrainChain && !draining }
	for family := range proxier.Families {
		if tools.Usable(ctx, family) != nil {
			continue
		}
		if err := cleanupFamily(ctx, tools, family, false, mine); err != nil {
			errs = append(errs, fmt.Errorf("remove %s rules of mode ipvs: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// MasqueradeIPVS makes rules that replace virtual servers masquerade connections of this host to
// the addresses and ports in these sets. While an address is on kube-ipvs0, it is also the source
// that the kernel chooses for connections to it, and endpoints cannot reply to that. CleanupIPVS
// ends it.
func MasqueradeIPVS(ctx context.Context, opts *Options, sets [proxier.Families]string) error {
	var errs []error
	for family, set := range sets {
		family := proxier.Family(family)
		if set == "" || opts.Tools.Usable(ctx, family) != nil {
			continue
		}
		if err := masqueradeIPVS(ctx, opts, family, set); err != nil {
			errs = append(errs, fmt.Errorf("masquerade %s connections of this host: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

func masqueradeIPVS(ctx context.Context, opts *Options, family proxier.Family, set string) error {
	cleaning.Lock()
	defer cleaning.Unlock()
	// Before the table nat in any case, whose rules end with the first that translates.
	const name, jump = "mangle", "-j " + ipvsDrainChain
	table, err := opts.Tools.Save(ctx, family, name)
	if err != nil {
		return err
	}
	t := newText()
	part := t.table(name)
	mark := fmt.Sprintf("%#x/%#[1]x", opts.mark())
	part.write(ipvsDrainChain, []string{"-m conntrack --ctstate NEW -m set --match-set " + set + " src,dst -j MARK --set-xmark " + mark})
	if output := table.Chain("OUTPUT"); output == nil || !slices.Contains(output.Rules, jump) {
		part.insert("OUTPUT", jump)
	}
	return opts.Tools.Restore(ctx, family, t.bytes())
}

// asksConntrack is the rule of drainChain.
const asksConntrack = "-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"

// cleaning serialises reading rules and deleting them: a rule can be deleted only once.
var cleaning sync.Mutex

func cleanupFamily(ctx context.Context, tools Tools, family proxier.Family, keepEstablished bool, mine func(chain string) bool) error {
	cleaning.Lock()
	defer cleaning.Unlock()
	found, always := false, keepEstablished && !conntrack.PicksUpEstablished("/")
	for _, name := range []string{"mangle", "nat", "filter"} {
		table, err := tools.Save(ctx, family, name)
		if err != nil {
			return err
		}
		t := newText()
		part := t.table(name)
		for _, c := range table.Chains {
			if c.Name == drainChain && mine(drainChain) {
				if !keepEstablished || !always && !found && !conntrack.AnyTranslated(family) {
					part.drop(c.Name)
				}
				continue
			}
			if mine(c.Name) {
				found = true
				part.drop(c.Name)
				continue
			}
			for _, r := range c.Rules {
				if mine(jumpOf(r)) {
					part.delete(c.Name, r)
				}
			}
		}
		// A connection may have been established meanwhile.
		if (found && keepEstablished || always) && name == "filter" && table.Chain(drainChain) == nil {
			part.write(drainChain, []string{asksConntrack})
		}
		if input := t.bytes(); len(input) > 0 {
			if err := tools.Restore(ctx, family, input); err != nil {
				return err
			}
		}
	}
	return nil
}
