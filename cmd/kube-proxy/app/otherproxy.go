// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/events"
	"github.com/tandem-proxy/tandem/sources/otherproxy"
)

const (
	// otherInterval is how often this process looks for another kube-proxy: one dump of
	// listening sockets, and a request if there is one.
	otherInterval = 5 * time.Second
	// otherWaitInterval is how often it does while it waits for that to end.
	otherWaitInterval = time.Second
	// otherMisses is the number of looks in a row after which it is gone: a restart takes some
	// seconds.
	otherMisses = 3
)

// newFinder looks for another kube-proxy at the ports of this one, and at upstream's.
func newFinder(c *config.Config) *otherproxy.Finder {
	f := &otherproxy.Finder{Ports: []uint16{config.MetricsPort, config.HealthzPort}, Own: string(capabilities.ModeEBPF), ProcRoot: c.Tandem.EBPF.ProcRoot}
	f.Ports = append(f.Ports, serverPorts(c)...)
	return f
}

// serverPorts are those of the servers of this process.
func serverPorts(c *config.Config) (list []uint16) {
	for _, address := range []string{c.KubeProxy.MetricsBindAddress, c.KubeProxy.HealthzBindAddress} {
		if port := serverPort(address); port != 0 {
			list = append(list, port)
		}
	}
	return list
}

// otherProxy follows another kube-proxy on this node.
type otherProxy struct {
	find   func(context.Context) (*otherproxy.Proxy, error)
	shared bool // the other one is to stay
	// delay is how long to wait for it to end before taking over.
	delay time.Duration
	// seen is told what every look found, nil for none, and record records Events on the Node.
	seen   func(*otherproxy.Proxy)
	record func(eventType, reason, note string)
	// ended is called when one that was not to stay has ended: what it left is removed.
	ended func()
	clock clock.Clock
}

func (p *proxy) newOtherProxy() *otherProxy {
	c := p.opts.Config
	return &otherProxy{
		find: newFinder(c).Find, shared: c.Tandem.Coexistence.Enabled(), delay: c.Tandem.TakeOverDelay.Duration, clock: clock.RealClock{},
		seen: func(found *otherproxy.Proxy) {
			if p.metrics.OtherProxy(found != nil); found != nil {
				p.withActive(func(open activeMode) { open.foundOther(found.Listeners) })
			}
		},
		record: func(eventType, reason, note string) {
			if p.recorder != nil {
				p.recorder.Eventf(events.NodeReference(p.opts.nodeName), eventType, reason, "FollowOtherProxy", "%s", note)
			}
		},
	}
}

// look returns another kube-proxy; with an error, there may be one. What listens without an answer may be one that is stopped
// or starved, so it has not ended; but it does not update its share of the traffic either.
func (o *otherProxy) look(ctx context.Context) (found *otherproxy.Proxy, err error) {
	found, err = o.find(ctx)
	if err != nil && !(o.shared && errors.Is(err, otherproxy.ErrSilent)) {
		if ctx.Err() == nil {
			klog.FromContext(ctx).V(2).Info("Cannot look for another kube-proxy on this node", "err", err)
		}
		return nil, err
	}
	o.seen(found)
	return found, nil
}

func (o *otherProxy) pause(ctx context.Context, d time.Duration) bool {
	timer := o.clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C():
		return true
	}
}

// await waits for another kube-proxy to end, but not longer than the delay. It calls waiting once
// if it has to wait. Another process in mode ebpf does not count: that waits for a lock.
func (o *otherProxy) await(ctx context.Context, waiting func()) error {
	if o.shared {
		return nil
	}
	logger, start := klog.FromContext(ctx), o.clock.Now()
	var was *otherproxy.Proxy
	for looks := 1; ; looks++ {
		found, err := o.look(ctx)
		if err != nil {
			found = was
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case found == nil && errors.Is(err, otherproxy.ErrSilent) && looks < otherMisses && o.clock.Since(start) < o.delay: // it may answer soon, as on a node that starts
		case found == nil:
			if was != nil {
				logger.Info("The other kube-proxy has ended; taking over", "after", o.clock.Since(start).Round(time.Millisecond))
			}
			return nil
		case was == nil:
			logger.Info("Another kube-proxy runs on this node; waiting for it to end before taking over (--take-over-delay). Two would overwrite each other's rules; --coexist shares the traffic with one that stays",
				"other", found.String(), "atMost", o.delay)
			o.record(v1.EventTypeWarning, "OtherProxyRuns", fmt.Sprintf("waiting up to %s for another kube-proxy to end (%s)", o.delay, found))
			waiting()
		case o.clock.Since(start) >= o.delay:
			logger.Info("The other kube-proxy still runs; taking over. It may overwrite rules of this one: end it, or share the traffic with it (--coexist)", "other", found.String())
			return nil
		}
		was = found
		o.pause(ctx, min(otherWaitInterval, o.delay))
	}
}

// follow reports another kube-proxy that appears or disappears, until ctx is done.
func (o *otherProxy) follow(ctx context.Context) {
	was, err := o.look(ctx)
	// One that starts together with this process may not be there yet.
	missing := was == nil && o.shared
	o.report(ctx, was, was == nil)
	misses := 0
	if missing && err == nil {
		misses++
	}
	for o.pause(ctx, otherInterval) {
		found, err := o.look(ctx)
		switch {
		case err != nil: // it may be there
			misses = 0
			continue
		case found != nil:
			misses = 0
		case was != nil || missing:
			if misses++; misses < otherMisses {
				continue
			}
			misses = 0
		}
		same := !missing && (found == nil) == (was == nil) && (found == nil || found.Mode == was.Mode && found.Process == was.Process)
		o.report(ctx, found, same)
		was, missing = found, false
	}
}

// report says what another kube-proxy, or none, means to this one.
func (o *otherProxy) report(ctx context.Context, found *otherproxy.Proxy, known bool) {
	if known || ctx.Err() != nil {
		return
	}
	logger := klog.FromContext(ctx)
	switch {
	case found != nil && o.shared:
		logger.Info("Another kube-proxy serves the rest of the traffic", "other", found.String())
		o.record(v1.EventTypeNormal, "OtherProxyRuns", "another kube-proxy serves the rest of the traffic ("+found.String()+")")
	case found != nil:
		logger.Info("Another kube-proxy runs on this node; both write rules for the same Services. End it, or share the traffic with it (--coexist)", "other", found.String())
		o.record(v1.EventTypeWarning, "OtherProxyRuns", "another kube-proxy runs on this node beside this one ("+found.String()+"); end it, or set coexistence")
	case o.shared:
		const text = "no other kube-proxy answers on this node; its share of the traffic is not updated, and may be unserved"
		logger.Info("Found no other kube-proxy on this node; its share of the traffic is not updated, and may be unserved")
		o.record(v1.EventTypeWarning, "OtherProxyMissing", text)
	default:
		logger.Info("The other kube-proxy on this node has ended; removing what it left")
		o.ended()
	}
}
