// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/tc"
)

// Attached says whether programs of ours serve a cgroup. Without CAP_SYS_ADMIN it can tell if
// there are none at all, of anybody's.
func Attached(cgroupRoot string) (bool, error) {
	cgroup, err := openCgroup2(cgroupRoot)
	if err != nil {
		return false, err
	}
	defer cgroup.Close()
	found, err := findAttached(cgroup)
	closeAttached(found)
	if errors.Is(err, fs.ErrPermission) && isBare(cgroup) {
		return false, nil
	}
	return len(found) > 0, err
}

// Silence has the programs that an earlier process left translate no connection that
// they do not translate yet. It is for who cannot Open the tier, and so cannot Drain it:
// the programs stay, and with them the connections there are.
func Silence(cgroupRoot string) error {
	cgroup, err := openCgroup2(cgroupRoot)
	if err != nil {
		return err
	}
	defer cgroup.Close()
	// A process that still runs would write its frontends again.
	if err := lock(cgroup); err != nil {
		return err
	}
	return silence(cgroup)
}

// Drain hands over to a proxy that serves already: from now on no connection is
// translated that is not translated yet. Those from outside that are go on, and when
// the last one has ended, everything of ours goes. It returns then, or when ctx is done;
// what is left may be drained on by another process. Nothing else may have been asked of
// the tier.
//
// It works on the maps that the programs have which serve, whether Open took those over
// or not.
func (t *Tier) Drain(ctx context.Context) error { return t.drain(ctx, gcInterval) }

// tellAgain is after how many looks at the flows programs are replaced that could not be.
const tellAgain = 8

func (t *Tier) drain(ctx context.Context, interval time.Duration) error {
	d := &drain{tier: t}
	defer d.close()
	if err := t.netns.Do(d.begin); err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	told := false
	for tick := 0; ; tick++ {
		// A device that does not take them now may never do, and what it has goes on
		// serving what is open.
		if !told && tick%tellAgain == 0 {
			err := t.netns.Do(func() error { return eachServed(d.tell) })
			if told = err == nil; !told {
				logger.Error(err, "Not all programs know that another proxy serves; trying again")
			}
		}
		left, err := d.sweep(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			logger.Error(err, "Cannot end flows whose time is up; trying again", "interval", interval)
		case left == 0:
			return t.Cleanup(ctx)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.closing:
			return nil
		case <-ticker.C:
		}
	}
}

// drain is what Drain works with.
type drain struct {
	tier    *Tier
	packets []*packets   // one for each set of maps that programs on devices have
	tables  []*flowTable // that are in use
}

func (d *drain) begin() error {
	if err := silence(d.tier.cgroup); err != nil {
		return fmt.Errorf("take the frontends away: %w", err)
	}
	// Those on devices may have others than those on the cgroup, if a process died
	// between the two.
	if err := eachInUse(d.tier.cgroup, d.findFlows); err != nil {
		return fmt.Errorf("find the flows: %w", err)
	}
	return nil
}

// tell has a device's programs know that another proxy serves. Those of another layout
// are left as they are: ours could not use their maps.
func (d *drain) tell(device *netlink.LinkAttrs, found []tc.Attachment) error {
	maps, err := mapsOf(found[0].Program)
	if err != nil {
		return err
	}
	p, err := d.packetsOn(maps)
	if p == nil || err != nil {
		return err
	}
	v, err := inheritedVariant(device, found[0].Program)
	if err != nil {
		return err
	}
	if err := p.attach(device.Index, v); err != nil {
		return fmt.Errorf("device %s: %w", device.Name, err)
	}
	return nil
}

// packetsOn are the programs on these maps, which become theirs; nil if ours cannot use
// them.
func (d *drain) packetsOn(maps map[string]*ciliumebpf.Map) (*packets, error) {
	for _, p := range d.packets {
		if same, err := sameMap(p.maps["tdm_meta"], maps["tdm_meta"]); same || err != nil {
			closeMaps(maps)
			return p, err
		}
	}
	var meta metaEntry
	if err := maps["tdm_meta"].Lookup(uint32(0), &meta); err != nil || meta.Magic != metaMagic || meta.Layout != layoutVersion {
		closeMaps(maps)
		return nil, nil
	}
	p := newPackets(maps, &d.tier.opts, d.tier.packets.snat)
	p.draining = true
	d.packets = append(d.packets, p)
	return p, nil
}

// findFlows opens the flows of a program, unless they are known.
func (d *drain) findFlows(program *ciliumebpf.Program) error {
	maps, err := mapsOf(program)
	if err != nil {
		return err
	}
	defer closeMaps(maps)
	for _, name := range flowMapNames {
		own := d.tier.flowMaps[name]
		if m := maps[name]; m == nil || m.KeySize() != own.KeySize() || m.ValueSize() != own.ValueSize() {
			return fmt.Errorf("%s has another %s; its flows cannot be read", program, name)
		}
	}
	for _, t := range d.tables {
		if same, err := sameMap(t.flows, maps["tdm_flow"]); same || err != nil {
			return err
		}
	}
	t, err := cloneFlowTable(maps)
	if err != nil {
		return err
	}
	d.tables = append(d.tables, t)
	return t.recover(waitForPrograms)
}

// sweep ends flows whose time is up, and returns how many are left.
func (d *drain) sweep(ctx context.Context) (left int, err error) {
	for _, t := range d.tables {
		if t.used() == 0 {
			continue
		}
		_, sweepErr := t.sweep(ctx, &d.tier.opts.Timeouts, monotonicSeconds())
		left, err = left+t.used(), errors.Join(err, sweepErr)
	}
	return left, err
}

func (d *drain) close() {
	for _, p := range d.packets {
		p.close()
		closeMaps(p.maps)
	}
	for _, t := range d.tables {
		t.release()
	}
}

// silence takes away what leads to backends from all programs that are attached. The
// backends stay: flows ask for theirs.
func silence(cgroup *os.File) error {
	return eachInUse(cgroup, func(program *ciliumebpf.Program) error {
		maps, err := mapsOf(program)
		if err != nil {
			return err
		}
		defer closeMaps(maps)
		// Ranges first: what is no frontend any more would be rejected there.
		return errors.Join(forgetPrefixes(maps["tdm_node"]), empty(maps["tdm_frontend"]), empty(maps["tdm_vip"]))
	})
}

// forgetPrefixes has programs find none in either element of the node map. The prefixes
// themselves stay: who is just reading them would find that a cleared one has every
// address.
func forgetPrefixes(m *ciliumebpf.Map) error {
	if m == nil {
		return nil
	}
	for i := range m.MaxEntries() {
		value, err := m.LookupBytes(i)
		if err != nil {
			return fmt.Errorf("read what is known of the node: %w", err)
		}
		clear(value[:unsafe.Offsetof(nodeEntry{}.Pods)])
		if err := m.Put(i, value); err != nil {
			return fmt.Errorf("write what is known of the node: %w", err)
		}
	}
	return nil
}

// empty deletes all of a map, whatever its layout.
func empty(m *ciliumebpf.Map) error {
	if m == nil {
		return nil
	}
	var keys [][]byte
	for last := any(nil); ; {
		key, err := m.NextKeyBytes(last)
		if err != nil {
			return fmt.Errorf("read the keys of %s: %w", m, err)
		}
		if key == nil {
			break
		}
		keys, last = append(keys, key), key
	}
	for _, key := range keys {
		if err := m.Delete(key); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
			return fmt.Errorf("empty %s: %w", m, err)
		}
	}
	return nil
}

// eachInUse calls fn with the programs of ours that are attached: to the cgroup, and to
// what comes in by devices of this network namespace.
func eachInUse(cgroup *os.File, fn func(*ciliumebpf.Program) error) error {
	found, err := findAttached(cgroup)
	if err != nil {
		return err
	}
	defer closeAttached(found)
	var errs []error
	for _, a := range found {
		errs = append(errs, fn(a.program))
	}
	return errors.Join(append(errs, eachServed(func(_ *netlink.LinkAttrs, found []tc.Attachment) error {
		var errs []error
		for _, a := range found {
			errs = append(errs, fn(a.Program))
		}
		return errors.Join(errs...)
	}))...)
}

// eachServed calls fn with the devices of this network namespace that have programs of
// ours, and with those that see what comes in.
func eachServed(fn func(device *netlink.LinkAttrs, found []tc.Attachment) error) error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		found, err := tc.Find(l.Attrs().Index, tc.Ingress, isOurProgram)
		if err != nil || len(found) == 0 {
			continue // what cannot be looked at has been left by now
		}
		errs = append(errs, fn(l.Attrs(), found))
		tc.Close(found)
	}
	return errors.Join(errs...)
}
