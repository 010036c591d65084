// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"context"
	"errors"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/optouts"
	"github.com/tandem-proxy/tandem/proxier/ebpf/podns"
)

// Open loads the programs. If an earlier process left maps of the same layout and sizes, it
// adopts them: connections and frontends stay as they are. Without a predecessor, nothing is
// attached before the first Sync. It needs CAP_NET_ADMIN, and CAP_SYS_ADMIN, without which the
// kernel opens no programs and maps by id; before Linux 5.11 also CAP_SYS_RESOURCE, to lock
// memory.
func Open(ctx context.Context, opts Options) (*Tier, error) {
	opts.Sizes, opts.Timeouts = opts.Sizes.WithDefaults(), opts.Timeouts.WithDefaults()
	opts.ProcRoot = cmp.Or(opts.ProcRoot, "/proc")
	if err := opts.Sizes.Validate(); err != nil {
		return nil, err
	}
	cgroup, err := datapath.OpenCgroup(opts.CgroupRoot)
	if err != nil {
		return nil, err
	}
	t := &Tier{opts: opts, cgroup: cgroup, closing: make(chan struct{}), optOutsChanged: make(chan struct{}, 1)}
	t.growth = newGrower(&opts)
	t.probes.reset()
	t.optOuts = optouts.New(podns.New(opts.ProcRoot), t.report)
	if err := t.open(ctx); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

func (t *Tier) open(ctx context.Context) error {
	var err error
	if t.lock, err = datapath.Lock(ctx, t.cgroup); err != nil {
		return err
	}
	if t.hostCookie, err = netns.Cookie(); err != nil {
		return err
	}
	if t.netns, err = netns.Own(); err != nil {
		return err
	}
	if t.earlier, err = datapath.FindAttached(t.cgroup); err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	if t.sizes, err = t.firstSizes(logger); err != nil {
		return err
	}
	specs, err := t.loadSpecs(t.sizes)
	if err != nil {
		return err
	}
	if len(t.earlier) > 0 {
		why := t.adopt(ctx, specs)
		if why == nil {
			t.adopted = true
			return t.attach()
		}
		logger.Info("Cannot adopt the maps in the kernel; building new ones beside them", "reason", why)
	}
	k := t.keep(logger, specs)
	defer k.maps.Close() // the collection has its own
	if err := t.load(ctx, specs, k.maps); err != nil {
		return err
	}
	for cookie, by := range k.optOuts {
		if err := t.maps["tdm_optout"].Put(cookie, uint8(by)); err != nil {
			logger.Error(err, "The map of opt-outs is full; dropped an opt-out", "netNSCookie", cookie)
		}
	}
	t.writer.Format(k.generation)
	t.describeLimits()
	return nil // attached by Sync
}
