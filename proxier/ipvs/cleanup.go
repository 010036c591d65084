// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
)

// Cleanup implements proxier.Tier. Connections through virtual servers end.
func (t *Tier) Cleanup(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reset()
	// Rules first, as sets that they ask cannot go.
	return errors.Join(t.rules.Cleanup(ctx), t.system.cleanup(ctx))
}

// Cleanup removes everything of this mode, ours and upstream's, in the network namespace
// of the calling thread: rules, if there are tools, virtual servers, kube-ipvs0 and sets. Virtual servers that
// are neither at an address of kube-ipvs0 nor at a NodePort stay, as do excluded ones.
func Cleanup(ctx context.Context, opts Options) error {
	var err error
	if opts.Rules.Tools != nil {
		err = iptables.Cleanup(ctx, opts.Rules.Tools, true)
	}
	nl, err2 := netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	if err2 != nil {
		return errors.Join(err, fmt.Errorf("open netlink: %w", err2))
	}
	defer nl.Close()
	return errors.Join(err, removeAll(nl, &opts))
}

// Present says whether there is anything of this mode in the network namespace of the
// calling thread. It asks for kube-ipvs0, without which nothing is served.
func Present() (bool, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return false, fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	_, err = nl.LinkByName(Device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return false, nil
	}
	return err == nil, err
}

func (s *kernelSystem) cleanup(context.Context) error {
	return s.netns.Do(func() error { return removeAll(s.nl, s.opts) })
}

// loaded is there when the module is. To ask in any other way would load it.
const loaded = "/proc/thread-self/net/ip_vs"

func removeAll(nl *netlink.Handle, opts *Options) error {
	sets := &ipsets{nl: nl, families: []proxier.Family{proxier.IPv4, proxier.IPv6}}
	device := &device{nl: nl}
	var errs []error
	if _, err := os.Stat(loaded); err == nil {
		errs = append(errs, removeServers(device, sets, opts))
	}
	return errors.Join(append(errs, device.remove(), sets.remove())...)
}

// removeServers removes those at addresses of kube-ipvs0, and at NodePorts.
func removeServers(device *device, sets *ipsets, opts *Options) error {
	servers, err := openServers()
	if err != nil {
		return err
	}
	defer servers.Close()
	list, err := servers.List()
	if err != nil {
		return fmt.Errorf("list virtual servers: %w", err)
	}
	ours := map[netip.Addr]struct{}{}
	if link, err := device.nl.LinkByName(Device); err == nil {
		device.index = link.Attrs().Index
		addrs, err := device.List()
		if err != nil {
			return err
		}
		for _, a := range addrs {
			ours[a] = struct{}{}
		}
	}
	ports := map[member]struct{}{}
	for f := range proxier.Families {
		for _, names := range nodePortSets {
			members, err := sets.list(set{names[0], f})
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
			for _, m := range members {
				ports[m] = struct{}{}
			}
		}
	}
	var errs []error
	for k := range list {
		if opts.excludes(k.addr.Addr()) || !has(ours, k.addr.Addr()) && !has(ports, memberOf(nodePortSets[k.protocol][0], k.addr, k.protocol)) {
			continue
		}
		if err := servers.Delete(k); err != nil {
			errs = append(errs, fmt.Errorf("delete virtual server %s: %w", k, err))
		}
	}
	return errors.Join(errs...)
}
