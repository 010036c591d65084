// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hostfilter

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/nftables"
	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// early are the tables of iptables whose chain PREROUTING is before DNAT, and forwarding those whose
// chain FORWARD kube-proxy's rules have an exception in.
var early, forwarding = []string{"raw", "mangle"}, []string{"filter"}

// Filters are what a host has.
type Filters struct {
	// BeforeDNAT are rules that can drop packets before their destination is translated.
	BeforeDNAT []Rule
	// Firewalls forward only what they know.
	Firewalls []Firewall
	// Unread says why there may be more: a Watcher cannot read all rules, and that lasts. It is the first reason until all can be read, and
	// empty otherwise.
	Unread string
}

// Read reads the rules in the network namespace of the calling thread. It changes nothing, and needs
// CAP_NET_ADMIN. With an error it returns what it could read.
func Read(ctx context.Context) (f Filters, err error) {
	read, errs := readSources(ctx)
	for i := range read {
		f.BeforeDNAT = append(f.BeforeDNAT, read[i].BeforeDNAT...)
		f.Firewalls = append(f.Firewalls, read[i].Firewalls...)
	}
	return f, errors.Join(errs[:]...)
}

// sources is how many parts of the kernel have rules: nf_tables, and the legacy variant of iptables.
const sources = 2

// readSources reads each source, what it can where there is an error.
func readSources(ctx context.Context) (list [sources]Filters, errs [sources]error) {
	for i, read := range [sources]func(*Filters, context.Context, *found) error{(*Filters).readNFTables, (*Filters).readLegacy} {
		var to found
		errs[i] = read(&list[i], ctx, &to)
		list[i].BeforeDNAT = to.rules
	}
	return list, errs
}

// readNFTables reads nf_tables, including what the nft variant of iptables has there.
func (f *Filters) readNFTables(ctx context.Context, to *found) error {
	chains, err := nftables.Chains(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for i := range chains {
		c := &chains[i]
		forward := c.Hook == "forward" && slices.Contains([]string{"ip", "ip6", "inet"}, c.Family)
		if c.Table == "kube-proxy" || !forward && !isEarly(c) {
			continue
		}
		table := c.Family + " " + c.Table
		w := newWalk(func(chain string) (list []step, err error) {
			rules, err := nftables.Rules(ctx, c.Family, c.Table, chain)
			for _, r := range rules {
				list = append(list, step{r, fmt.Sprintf("rule %d of chain %s in table %s of nf_tables", r.Handle, chain, table)})
			}
			return list, err
		}, to)
		within := inet.Match{}
		switch c.Family {
		case "ip":
			within.Not[inet.IPv6] = true
		case "ip6":
			within.Not[inet.IPv4] = true
		}
		where := fmt.Sprintf("chain %s in table %s of nf_tables", c.Name, table)
		if forward {
			byStatus := c.Family == "inet" || !slices.Contains(forwarding, c.Table)
			if found, is := w.firewall(c.Name, within, c.Policy == "drop", byStatus, where); is {
				f.Firewalls = append(f.Firewalls, found)
			}
		} else {
			w.begin(c.Name, within, c.Policy == "drop", "policy drop of "+where)
		}
		errs = append(errs, w.errs...)
	}
	return errors.Join(errs...)
}

// isEarly says that packets that come in pass the chain before DNAT.
func isEarly(c *nftables.Chain) bool {
	switch c.Family {
	case "ip", "ip6", "inet":
		return c.Hook == nftables.HookIngress || c.Hook == "prerouting" && c.Priority < nftables.PriorityDNAT
	case "netdev":
		return c.Hook == nftables.HookIngress
	}
	return false
}

// hasLegacy says that there are tables to read of the legacy variant of iptables.
func hasLegacy() bool { return xtables.HasLegacy(slices.Concat(early, forwarding)...) }

// readLegacy reads the legacy variant of iptables, but only tables that exist.
func (f *Filters) readLegacy(ctx context.Context, to *found) error {
	if !hasLegacy() {
		return nil
	}
	tools, err := xtables.New(xtables.Legacy)
	if err != nil {
		return fmt.Errorf("there are rules of the legacy iptables: %w", err)
	}
	var errs []error
	for family := range inet.Families {
		for _, name := range slices.Concat(early, forwarding) {
			table, err := tools.SaveExisting(ctx, family, name)
			if errs = append(errs, err); table == nil {
				continue
			}
			t := &saved{table, family, xtables.Legacy.String()}
			if slices.Contains(early, name) {
				t.beforeDNAT(to)
			} else if found, is := t.firewall(); is {
				f.Firewalls = append(f.Firewalls, found)
			}
		}
	}
	return errors.Join(errs...)
}
