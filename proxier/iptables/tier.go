// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/proxier"
)

// Tier serves frontends by netfilter rules.
type Tier struct {
	opts     Options
	netns    netns.Namespace
	mu       sync.Mutex
	rules    *writer
	unusable [proxier.Families]error
	// uncounted is why rules of a family do not count packets.
	uncounted [proxier.Families]error
	// routeLocalnet is the file of the kernel's setting. noLoopback says that it could not be
	// written.
	routeLocalnet string
	noLoopback    bool
}

var _ proxier.Tier = (*Tier)(nil)

// Open finds out which families can be served in the network namespace of the calling
// thread; it needs CAP_NET_ADMIN. It writes no rules, but creates the counters that they name.
func Open(ctx context.Context, opts Options) (*Tier, error) {
	t := &Tier{opts: opts, routeLocalnet: routeLocalnet}
	for f := range proxier.Families {
		t.unusable[f] = opts.Tools.Usable(ctx, f)
	}
	if t.unusable[proxier.IPv4] != nil && t.unusable[proxier.IPv6] != nil {
		return nil, errors.Join(t.unusable[:]...)
	}
	for f := range proxier.Families {
		if t.uncounted[f] = t.unusable[f]; t.uncounted[f] == nil {
			t.uncounted[f] = tryCounters(ctx, &t.opts, f)
		}
		if err := t.uncounted[f]; err != nil && opts.Counters != nil && t.unusable[f] == nil {
			klog.FromContext(ctx).Info("Rules do not count packets; the metrics of dropped invalid packets and of NodePorts at loopback addresses are missing", "family", f, "reason", err.Error())
		}
	}
	t.rules = t.newWriter()
	var err error
	t.netns, err = netns.Own()
	return t, err
}

func (t *Tier) newWriter() *writer {
	w := newWriter(&t.opts, func(f proxier.Family) bool { return t.unusable[f] == nil })
	for name, f := range w.families {
		if f != nil {
			f.counts = t.uncounted[name] == nil
		}
	}
	return w
}

// Sync implements proxier.Tier.
func (t *Tier) Sync(ctx context.Context, update proxier.Update) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.netns.Do(func() error {
		errs := t.rules.write(ctx, update)
		t.openLoopback()
		checkAffinity(ctx, &update)
		if t.opts.Flows == nil {
			return errors.Join(errs[:]...)
		}
		t.opts.Flows.Observe(&update)
		for f := range proxier.Families {
			if errs[f] == nil { // else old rules would create the same flows again
				_, errs[f] = t.opts.Flows.Reconcile(ctx, f)
			}
		}
		return errors.Join(errs[:]...)
	})
}

const routeLocalnet = "/proc/sys/net/ipv4/conf/all/route_localnet"

// openLoopback sets route_localnet, so that translated packets with a loopback source are
// sent. The rule that protects loopback addresses from neighbours has to exist before. Where
// /proc/sys is read-only this keeps failing: that is reported once, and blocks nothing else.
func (t *Tier) openLoopback() {
	f := t.rules.families[proxier.IPv4]
	if f == nil || !f.whole || !f.loopback {
		return
	}
	if b, err := os.ReadFile(t.routeLocalnet); err == nil && len(b) > 0 && b[0] == '1' {
		t.noLoopback = false
		return
	}
	err := os.WriteFile(t.routeLocalnet, []byte("1"), 0o644)
	if err != nil && !t.noLoopback && t.opts.Reporter != nil {
		t.opts.Reporter.Report(proxier.Problem{
			Kind: "Node", Reason: proxier.ReasonUnsupported,
			Message: fmt.Sprintf("NodePorts cannot be reached at loopback addresses: %v; set net.ipv4.conf.all.route_localnet to 1, or disable them there (localhostNodePorts, nodePortAddresses)", err),
		})
	}
	t.noLoopback = err != nil
}

// Usable returns nil if a family can be served, else the reason.
func (t *Tier) Usable(f proxier.Family) error { return t.unusable[f] }

var errLoopback = errors.New("rules do not translate what is sent to a hostIP that is a loopback address; mode ebpf does")

// Supports implements proxier.Tier.
func (t *Tier) Supports(_ *proxier.Decision, f *proxier.Frontend) error {
	if f.Addr.Addr().IsLoopback() {
		return errLoopback
	}
	return t.unusable[proxier.FamilyOf(f.Addr.Addr())]
}

// Cleanup implements proxier.Tier. Established connections survive. Counters stay, for
// Counted and for later rules.
func (t *Tier) Cleanup(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rules = t.newWriter()
	return t.netns.Do(func() error { return Cleanup(ctx, t.opts.Tools, true) })
}

// Close releases what this process has open. The rules stay.
func (t *Tier) Close() error { return t.netns.Close() }
