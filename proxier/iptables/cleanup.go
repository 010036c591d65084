// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// Cleanup removes every chain of this mode and of mode ipvs, ours and upstream's, and the jumps to them.
// KUBE-FIREWALL stays: kubelet has one of that name. Where connections are to go on that
// are translated already, so does a chain that nothing leads to, for as long as there are
// such: without a rule that asks it, the kernel does without conntrack, and translates
// nothing any more.
func Cleanup(ctx context.Context, tools Tools, goOn bool) error {
	var errs []error
	for family := range proxier.Families {
		if tools.Usable(ctx, family) != nil {
			continue // nothing can be there
		}
		if err := cleanupFamily(ctx, tools, family, goOn, isOurs); err != nil {
			errs = append(errs, fmt.Errorf("remove %s rules: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// CleanupIPVS removes the chains that mode ipvs has and this one has not, and the jumps to
// them.
func CleanupIPVS(ctx context.Context, tools Tools) error {
	var errs []error
	for family := range proxier.Families {
		if tools.Usable(ctx, family) != nil {
			continue
		}
		if err := cleanupFamily(ctx, tools, family, false, func(chain string) bool { return slices.Contains(ofIPVS, chain) }); err != nil {
			errs = append(errs, fmt.Errorf("remove %s rules of mode ipvs: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// translates says whether conntrack changes the destination of a connection, or may.
func translates(family proxier.Family) bool {
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, [proxier.Families]netlink.InetFamily{unix.AF_INET, unix.AF_INET6}[family])
	return err != nil || slices.ContainsFunc(flows, func(f *netlink.ConntrackFlow) bool { return !f.Forward.DstIP.Equal(f.Reverse.SrcIP) })
}

// asksConntrack is all that drainChain holds.
const asksConntrack = "-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"

// cleaning is held by who reads rules to delete them: a rule goes but once.
var cleaning sync.Mutex

func cleanupFamily(ctx context.Context, tools Tools, family proxier.Family, goOn bool, mine func(chain string) bool) error {
	cleaning.Lock()
	defer cleaning.Unlock()
	found := false
	for _, name := range []string{"mangle", "nat", "filter"} {
		table, err := tools.Save(ctx, family, name)
		if err != nil {
			return err
		}
		t := newText()
		part := t.table(name)
		for _, c := range table.Chains {
			if c.Name == drainChain && mine(drainChain) {
				if !goOn || !found && !translates(family) {
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
		// A connection may have begun just now.
		if found && goOn && name == "filter" && table.Chain(drainChain) == nil {
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
