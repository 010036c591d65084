// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// leftovers are what processes of this mode left in a network namespace, but for rules.
type leftovers struct {
	nl     *netlink.Handle
	opts   *Options
	device *device
	sets   *ipsets
	// servers are nil where the module is not loaded.
	servers *kernelServers
	// nodePorts are read once: no process changes them any more.
	nodePorts map[member]struct{}
}

// loaded is there when the module is. To ask in any other way would load it.
const loaded = "/proc/thread-self/net/ip_vs"

// openLeftovers opens those of the network namespace of the calling thread.
func openLeftovers(opts *Options) (*leftovers, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	r := &leftovers{nl: nl, opts: opts, device: &device{nl: nl}, sets: &ipsets{nl: nl, families: []proxier.Family{proxier.IPv4, proxier.IPv6}}}
	if _, err := os.Stat(loaded); err == nil {
		if r.servers, err = openServers(); err != nil {
			nl.Close()
			return nil, err
		}
	}
	return r, nil
}

func (r *leftovers) close() {
	if r.servers != nil {
		r.servers.Close()
	}
	r.nl.Close()
}

// addrs are the addresses of kube-ipvs0; none if that is not there.
func (r *leftovers) addrs() ([]netip.Addr, error) {
	link, err := r.nl.LinkByName(Device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find device %s: %w", Device, err)
	}
	r.device.index = link.Attrs().Index
	return r.device.List()
}

// list lists the virtual servers at addresses of kube-ipvs0, and at NodePorts.
func (r *leftovers) list() (map[serverKey]server, error) {
	list, err := r.servers.List()
	if err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", err)
	}
	addrs, err := r.addrs()
	if err != nil {
		return nil, err
	}
	ours := map[netip.Addr]struct{}{}
	for _, a := range addrs {
		ours[a] = struct{}{}
	}
	if err := r.readNodePorts(); err != nil {
		return nil, err
	}
	for k := range list {
		if r.opts.excludes(k.Addr.Addr()) || !has(ours, k.Addr.Addr()) && !has(r.nodePorts, memberOf(nodePortSets[k.Protocol][0], k.Addr, k.Protocol)) {
			delete(list, k)
		}
	}
	return list, nil
}

func (r *leftovers) readNodePorts() error {
	if r.nodePorts != nil {
		return nil
	}
	ports := map[member]struct{}{}
	for f := range proxier.Families {
		for _, names := range nodePortSets {
			members, err := r.sets.list(set{names[0], f})
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
			for _, m := range members {
				ports[m] = struct{}{}
			}
		}
	}
	r.nodePorts = ports
	return nil
}

// remove removes them all. Connections through virtual servers end.
func (r *leftovers) remove() error {
	var errs []error
	if r.servers != nil {
		list, err := r.list()
		errs = append(errs, err)
		for k := range list {
			if err := r.servers.Delete(k); err != nil {
				errs = append(errs, fmt.Errorf("delete virtual server %s: %w", k, err))
			}
		}
	}
	return errors.Join(append(errs, r.device.remove(), r.sets.remove())...)
}
