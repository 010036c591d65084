// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/sockdiag"
)

// podDevices are the devices of pods whose sockets are not served: programs
// there serve their packets.
type podDevices struct {
	on map[int]variant // by index
	// known are the devices of network namespaces by their cookies; none is
	// known of one that was looked for in vain.
	known  map[uint64][]veth
	looked time.Time
}

// veth is a pair of devices by their indexes, each in its namespace.
type veth struct{ host, pod int }

const (
	// optOutInterval is the time between two looks at the opt-outs.
	optOutInterval = time.Second
	// searchInterval is the time between two searches through all namespaces.
	searchInterval = 30 * time.Second
)

// followOptOuts serves the packets of pods that opt out, until ctx is done.
func (t *Tier) followOptOuts(ctx context.Context) {
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(optOutInterval)
	defer ticker.Stop()
	for {
		if err := t.syncPodDevices(ctx); err != nil && ctx.Err() == nil {
			logger.Error(err, "Some pods that opted out are not served; trying again", "interval", optOutInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// syncPodDevices finds the devices and has programs on them.
func (t *Tier) syncPodDevices(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.pods.on
	err := t.findPodDevices(ctx)
	if !t.attached || t.waiting || maps.Equal(was, t.pods.on) {
		return err
	}
	return errors.Join(err, t.serveDevices(ctx))
}

// findPodDevices is called with mu held.
func (t *Tier) findPodDevices(ctx context.Context) error {
	cookies, err := keysOf[uint64, uint8](t.maps.TdmOptout)
	if err != nil {
		return fmt.Errorf("read the opt-outs: %w", err)
	}
	if len(cookies) == 0 && len(t.opts.PodDevices) == 0 {
		t.pods.on = nil
		return nil
	}
	return t.netns.Do(func() error {
		err := t.pods.find(ctx, cookies, t.opts.ProcRoot)
		on, listErr := t.podVariants(cookies)
		if listErr == nil {
			t.pods.on = on
		}
		return errors.Join(err, listErr)
	})
}

// find looks for namespaces whose devices are not known.
func (d *podDevices) find(ctx context.Context, cookies []uint64, procRoot string) error {
	missing := map[uint64]struct{}{}
	for _, cookie := range cookies {
		if len(d.known[cookie]) == 0 {
			if !has(d.known, cookie) {
				d.looked = time.Time{} // it is new
			}
			missing[cookie] = struct{}{}
		}
	}
	if len(missing) == 0 || time.Since(d.looked) < searchInterval {
		return nil
	}
	d.looked = time.Now()
	known := map[uint64][]veth{}
	for _, cookie := range cookies {
		known[cookie] = d.known[cookie]
	}
	d.known = known
	err := sockdiag.ForEachNetNS(ctx, procRoot, func(sockdiag.NetNS) error {
		cookie, err := ownNetNSCookie()
		if err != nil || !has(missing, cookie) {
			return err
		}
		links, err := netlink.LinkList()
		if err != nil {
			return fmt.Errorf("list the devices of namespace %d: %w", cookie, err)
		}
		for _, l := range links {
			if peer := l.Attrs().ParentIndex; peer != 0 {
				known[cookie] = append(known[cookie], veth{peer, l.Attrs().Index})
			}
		}
		return nil
	})
	for cookie := range missing {
		if len(known[cookie]) == 0 {
			return err // which may be why
		}
	}
	return nil
}

// podVariants are the devices that are there, and what they need.
func (t *Tier) podVariants(cookies []uint64) (map[int]variant, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	wanted := map[int]struct{}{}
	for _, cookie := range cookies {
		for _, pair := range t.pods.known[cookie] {
			// Its peer may be in a third namespace, and this one another.
			if slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Attrs().Index == pair.host && l.Attrs().ParentIndex == pair.pod }) {
				wanted[pair.host] = struct{}{}
			}
		}
	}
	if len(t.opts.PodDevices) > 0 {
		named, _ := devices.Named(links, t.opts.PodDevices)
		for _, d := range named {
			wanted[d.Index] = struct{}{}
		}
	}
	for _, d := range t.uplinks {
		delete(wanted, d.Index)
	}
	on := map[int]variant{}
	for _, l := range links {
		a := l.Attrs()
		if !has(wanted, a.Index) {
			continue
		}
		v := variant{role: rolePod, l3: a.EncapType != "ether"}
		if pods := t.writer.podDetector(); pods.Interface != "" {
			v.pod = pods.Local(netip.Addr{}, a.Name)
		}
		on[a.Index] = v
	}
	return on, nil
}
