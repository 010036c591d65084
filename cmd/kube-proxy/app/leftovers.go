// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/ipvs"
)

// leftovers are what other modes left in the kernel. They go once this one carries
// everything: until then they serve.
type leftovers struct {
	once    sync.Once
	carried chan struct{} // closed when this mode carries everything
	kinds   []leftover
}

// leftover is what one other mode left.
type leftover struct {
	what   string
	remove func(context.Context) error
}

func (p *proxy) leftovers() *leftovers {
	l := &leftovers{carried: make(chan struct{}), kinds: []leftover{{"table of mode nftables", removeNFTables}}}
	if p.decision.Mode != capabilities.ModeIPVS {
		l.kinds = append(l.kinds, leftover{"virtual servers of mode ipvs", func(ctx context.Context) error {
			return removeIPVS(ctx, p.opts.Config, ipvs.Drain)
		}})
	} else {
		l.kinds = append(l.kinds, leftover{"counters of mode iptables", func(ctx context.Context) error {
			return iptables.RemoveCounters(ctx, nfacct.Kernel{})
		}})
	}
	// In mode ebpf, the fallback sees to rules.
	if p.decision.Mode != capabilities.ModeEBPF && p.cgroup != "" {
		l.kinds = append(l.kinds, leftover{"programs of mode ebpf", p.drainFast})
	}
	return l
}

// Queued implements proxier.Observer.
func (l *leftovers) Queued(time.Time) {}

// Synced implements proxier.Observer.
func (l *leftovers) Synced(info proxier.SyncInfo) {
	if info.Full && info.Err == nil {
		l.once.Do(func() { close(l.carried) })
	}
}

// removal is how often a removal that failed is tried again.
var removal = wait.Backoff{Duration: time.Second, Factor: 2, Steps: 7, Cap: time.Minute}

// run removes them beside the syncs: some take as long as the connections they serve. It
// returns when they are gone, or ctx is done.
func (l *leftovers) run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-l.carried:
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, k := range l.kinds {
		wg.Go(func() {
			_ = removal.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) { // ends with ctx
				err := k.remove(ctx)
				if err != nil && ctx.Err() == nil {
					klog.FromContext(ctx).Error(err, "Cannot remove what another mode left; trying again", "what", k.what)
				}
				return err == nil, nil
			})
		})
	}
}

// drainFast has programs of mode ebpf serve nobody new, and go when nobody needs them.
func (p *proxy) drainFast(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	if there, err := ebpf.Attached(p.cgroup); !there || err != nil {
		return err
	}
	tier, err := p.openFast(ctx)
	if err != nil {
		return errors.Join(err, ebpf.Silence(p.cgroup))
	}
	defer tier.Close()
	logger.Info("The programs of mode ebpf serve no new connections, and go when the last of theirs from outside has ended")
	if err := tier.Drain(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	logger.Info("Removed the programs of mode ebpf")
	return nil
}
