// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

// CanUse returns nil if this tier can serve in the network namespace of the calling
// thread, or what is missing. It creates and removes kernel objects to find out.
func CanUse(ctx context.Context, opts Options) error {
	if _, err := probeServers(&opts); err != nil {
		return err
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	if err := probeDevice(nl); err != nil {
		return err
	}
	return probeSets(ctx, &ipsets{nl: nl}, opts.Tools)
}

// probes are addresses for documentation, as upstream's probe.
var probes = [proxier.Families]netip.AddrPort{
	netip.MustParseAddrPort("198.51.100.0:20000"), netip.MustParseAddrPort("[2001:db8::]:20000"),
}

// probeServers creates virtual servers. It returns the families for which that fails; rules
// serve those.
func probeServers(opts *Options) (unusable [proxier.Families]error, err error) {
	servers, err := openServers()
	if err != nil {
		return unusable, err
	}
	defer servers.Close()
	for f, at := range probes {
		k := keyOf(at, proxier.TCP)
		server := opts.newServer(&proxier.Decision{})
		err := servers.Add(k, server)
		if errors.Is(err, unix.EEXIST) { // a process was killed here
			_ = servers.Delete(k)
			err = servers.Add(k, server)
		}
		switch {
		case errors.Is(err, unix.ENOENT):
			return unusable, fmt.Errorf("find scheduler %s in the kernel (module ip_vs_%[1]s)", opts.scheduler())
		case err != nil:
			unusable[f] = fmt.Errorf("create an %s virtual server: %w", proxier.Family(f), err)
			continue
		}
		if err := servers.Delete(k); err != nil {
			return unusable, fmt.Errorf("delete a virtual server: %w", err)
		}
	}
	if unusable[proxier.IPv4] != nil && unusable[proxier.IPv6] != nil {
		return unusable, errors.Join(unusable[:]...)
	}
	return unusable, nil
}

// probeDevice is a name that fits (IFNAMSIZ).
func probeDevice(nl *netlink.Handle) error {
	if _, err := nl.LinkByName(Device); err == nil {
		return nil
	}
	link := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "kube-ipvs-probe"}}
	if err := nl.LinkAdd(link); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("create a dummy device (module dummy): %w", err)
	}
	if err := nl.LinkDel(link); err != nil {
		return fmt.Errorf("delete a dummy device: %w", err)
	}
	return nil
}

// probeSet is the name of a set by its type, which can be created beside one that a process left as it was killed.
func probeSet(is setType) string { return "KUBE-PROBE-" + string(is) }

// probeSets makes a set of each type, and has a rule ask it.
func probeSets(ctx context.Context, sets *ipsets, tools Tools) (err error) {
	if _, _, err := sets.nl.IpsetProtocol(); err != nil {
		return fmt.Errorf("find ipset in the kernel (module ip_set): %w", err)
	}
	for _, is := range []setType{hashIP, hashIPPort, hashIPPortIP, hashIPPortNet, bitmapPort} {
		if err := sets.create(probeSet(is), is, proxier.IPv4); err != nil {
			return fmt.Errorf("create an ipset of type %s: %w", is, err)
		}
		if is == bitmapPort {
			err = probeRule(ctx, tools)
		}
		if gone := sets.nl.IpsetDestroy(probeSet(is)); gone != nil && !errors.Is(gone, unix.ENOENT) {
			err = errors.Join(err, fmt.Errorf("destroy an ipset of type %s: %w", is, gone))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// probeRule writes a rule that asks the set, and takes it away again.
func probeRule(ctx context.Context, tools Tools) error {
	for f := range proxier.Families {
		if tools.Usable(ctx, f) != nil {
			continue
		}
		if err := tools.Restore(ctx, f, xtables.Probe("-p tcp -m set --match-set "+probeSet(bitmapPort)+" dst", "nat")); err != nil {
			return fmt.Errorf("write a rule that matches an ipset (module xt_set): %w", err)
		}
	}
	return nil
}
