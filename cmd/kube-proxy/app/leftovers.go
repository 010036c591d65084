// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
)

// leftovers removes what other modes left in the kernel, once this one carries
// everything: until then they serve.
type leftovers struct {
	ctx    context.Context
	remove func(context.Context) error
	once   sync.Once
}

func (p *proxy) leftovers(ctx context.Context) *leftovers {
	return &leftovers{ctx: ctx, remove: p.removeOthers}
}

func (l *leftovers) Queued(time.Time) {}

func (l *leftovers) Synced(info proxier.SyncInfo) {
	if !info.Full || info.Err != nil {
		return
	}
	l.once.Do(func() {
		if err := l.remove(l.ctx); err != nil {
			klog.FromContext(l.ctx).Error(err, "Cannot remove everything that other modes left; the next start tries again")
		}
	})
}

// removeOthers removes what modes besides this one leave. In mode ebpf, the fallback
// sees to rules.
func (p *proxy) removeOthers(ctx context.Context) error {
	errs := []error{removeNFTables(ctx)}
	if p.decision.Mode != capabilities.ModeEBPF && p.cgroup != "" {
		errs = append(errs, p.drainFast(ctx))
	}
	return errors.Join(errs...)
}

// drainFast has programs of mode ebpf serve nobody new, and go when nobody needs them.
func (p *proxy) drainFast(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	if there, err := ebpf.Attached(p.cgroup); !there || err != nil {
		return err
	}
	tier, err := p.openFast(ctx)
	if err != nil {
		return err
	}
	logger.Info("The programs of mode ebpf serve no new connections, and go when the last of theirs from outside has ended")
	go func() {
		defer tier.Close()
		if err := tier.Drain(ctx); err != nil {
			logger.Error(err, "Cannot remove the programs of mode ebpf; the next start tries again")
			return
		}
		if ctx.Err() == nil {
			logger.Info("Removed the programs of mode ebpf")
		}
	}()
	return nil
}
