// SPDX-License-Identifier: Apache-2.0

package app

import (
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sockets"
)

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/ipvs"
	"github.com/tandem-proxy/tandem/proxier/placement"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

// tiers are those that are open: one alone, or a fast one and what carries what that
// cannot.
type tiers struct {
	fast   *ebpf.Tier
	ipvs   *ipvs.Tier // which has rules of its own
	rules  *iptables.Tier
	placed *placement.Tier // nil unless there are both
}

// carrier is what decisions are given to.
func (p *proxy) carrierOf(t *tiers) proxier.Tier {
	switch {
	case t.placed != nil:
		return staleudp.Beside(t.placed, p.flows)
	case t.fast != nil:
		return staleudp.Beside(t.fast, p.flows)
	case t.ipvs != nil:
		return staleudp.Beside(t.ipvs, p.flows)
	}
	return t.rules
}

// unplaced counts the service ports that the fast path has no room for.
func (t *tiers) unplaced() int {
	if t.placed != nil {
		return t.placed.Overflow()
	}
	return len(t.fast.Unplaced())
}

func (t *tiers) close() error {
	var errs []error
	if t.placed != nil {
		t.placed.Wait()
	}
	if t.fast != nil {
		errs = append(errs, t.fast.Close())
	}
	if t.ipvs != nil {
		errs = append(errs, t.ipvs.Close())
	}
	if t.rules != nil {
		errs = append(errs, t.rules.Close())
	}
	return errors.Join(errs...)
}

var errNoFallback = errors.New("--ebpf-fallback=none")

// fallbackModes are those that may stand in for the one that was asked for.
func (p *proxy) fallbackModes() (list []capabilities.Mode) {
	if p.opts.Config.KubeProxy.Mode != config.ModeEBPF {
		return nil
	}
	for _, m := range p.opts.Config.Tandem.EBPF.Fallback {
		if m != config.FallbackNone {
			list = append(list, capabilities.Mode(m))
		}
	}
	return list
}

// runner has the intervals of the mode, by a configuration.
func (p *proxy) runner(c *config.Config) proxier.RunnerOptions {
	r := proxier.DefaultRunnerOptions()
	if p.decision.Mode == capabilities.ModeIPTables {
		k := &c.KubeProxy.IPTables
		r.MinInterval, r.MaxInterval = k.MinSyncPeriod.Duration, k.SyncPeriod.Duration
		r.RetryInterval = min(time.Second, r.MaxInterval) // each try runs programs
		return r
	}
	if p.decision.Mode == capabilities.ModeIPVS {
		k := &c.KubeProxy.IPVS
		r.MinInterval, r.MaxInterval = k.MinSyncPeriod.Duration, k.SyncPeriod.Duration
		r.RetryInterval = min(time.Second, r.MaxInterval)
		return r
	}
	e := &c.Tandem.EBPF
	r.MinInterval, r.MaxInterval = e.MinSyncPeriod.Duration, e.SyncPeriod.Duration
	r.RetryInterval = min(r.RetryInterval, r.MaxInterval)
	return r
}

// openTiers opens what the mode needs.
func (p *proxy) openTiers(ctx context.Context) (open tiers, err error) {
	logger := klog.FromContext(ctx)
	switch p.decision.Mode {
	case capabilities.ModeIPTables:
		open.rules, err = p.openRules(ctx)
		return open, err
	case capabilities.ModeIPVS:
		open.ipvs, err = p.openIPVS(ctx)
		return open, err
	}
	if open.fast, err = p.openFast(ctx); err != nil {
		return open, err
	}
	var rules *iptables.Tier
	err = errNoFallback
	if len(p.fallbackModes()) > 0 {
		rules, err = p.openRules(ctx)
	}
	whom, leaves := p.leavesPackets()
	if err != nil {
		logger.Info("Nothing carries what the fast path cannot (SCTP, and what does not fit into its maps)", "reason", err.Error())
		if leaves {
			logger.Info("Some clients are not served", "clients", whom)
		}
		return open, nil
	}
	if leaves {
		logger.Info("Some clients are served by rules", "clients", whom)
	}
	open.rules, open.placed = rules, placement.New(open.fast, rules, leaves)
	return open, nil
}

// ruleOptions are those of the iptables tier, alone or beside another.
func (p *proxy) ruleOptions(ctx context.Context) (iptables.Options, error) {
	tools, err := xtables.Find(ctx)
	if err != nil {
		return iptables.Options{}, fmt.Errorf("find the iptables of this node: %w", err)
	}
	k := &p.opts.Config.KubeProxy
	opts := iptables.Options{
		Tools: tools, Reporter: p.problems, Observer: p.metrics, KeepInvalid: k.Conntrack.TCPBeLiberal || liberalConntrack(),
	}
	if bit := k.IPTables.MasqueradeBit; bit != nil {
		n := int(*bit)
		opts.MasqueradeBit = &n
	}
	return opts, nil
}

// openRules opens the iptables tier.
func (p *proxy) openRules(ctx context.Context) (*iptables.Tier, error) {
	opts, err := p.ruleOptions(ctx)
	if err != nil {
		return nil, err
	}
	opts.Counters = nfacct.Kernel{} // in mode ipvs, upstream counts nothing
	if p.decision.Mode == capabilities.ModeIPTables {
		opts.Flows = p.flows
	}
	tier, err := iptables.Open(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("open the iptables tier: %w", err)
	}
	klog.FromContext(ctx).Info("Opened the iptables tier", "variant", opts.Tools.Variant())
	return tier, nil
}

// liberalConntrack says whether conntrack finds few packets invalid.
func liberalConntrack() bool {
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
	return err == nil && strings.TrimSpace(string(b)) != "0"
}

// openFast opens the eBPF tier. It waits for a process before this one to let go: two pods of a
// DaemonSet can overlap for a moment.
func (p *proxy) openFast(ctx context.Context) (*ebpf.Tier, error) {
	logger := klog.FromContext(ctx)
	opts, err := ebpfOptions(p.opts.Config, &p.report)
	if err != nil {
		return nil, err
	}
	opts.CgroupRoot, opts.Reporter = p.cgroup, p.problems
	if err := p.keepNodePorts(logger); err != nil {
		logger.Error(err, "Cannot keep connections of this host from getting NodePorts as their source ports", "nodePortRange", opts.NodePortRange)
	}
	for waited := false; ; waited = true {
		tier, err := ebpf.Open(ctx, opts)
		if err == nil {
			logger.Info("Opened the fast path", "cgroupRoot", p.cgroup, "adopted", tier.Adopted())
			return tier, nil
		}
		if !errors.Is(err, datapath.ErrBusy) {
			return nil, fmt.Errorf("open the fast path: %w", err)
		}
		if !waited {
			logger.Info("Another process serves this cgroup; waiting for its end", "cgroupRoot", p.cgroup)
			// What comes meanwhile would pile up.
			p.feed.stop()
			p.feed = nil
		}
		timer := time.NewTimer(busyInterval)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		case <-timer.C:
		}
	}
}

// closeStrays has the sockets of this node closed that netfilter's translated flows came
// from, where only programs translate by now: a connected socket does not pass them, and
// what it sends would be lost.
func (p *proxy) closeStrays(ended []conntrack.Flow) {
	p.tierMu.Lock()
	defer p.tierMu.Unlock()
	if p.tiers.fast == nil {
		return
	}
	byRules := func(netip.AddrPort) bool { return false }
	if p.tiers.placed != nil {
		byRules = p.tiers.placed.FallbackHas(proxier.UDP)
	}
	var strays []sockets.SocketPair
	for i := range ended {
		// Of what was not translated, it may be meant.
		if f := &ended[i]; f.Translated() && !byRules(f.Destination) {
			strays = append(strays, sockets.SocketPair{Local: f.Source, Remote: f.Destination})
		}
	}
	if len(strays) > 0 {
		p.tiers.fast.CloseUntranslated(strays)
	}
}

func (p *proxy) setTiers(open tiers) {
	p.tierMu.Lock()
	defer p.tierMu.Unlock()
	p.tiers = open
}

// counted is what /metrics asks of rules, while there are some.
func (p *proxy) counted() (metrics.RulePackets, bool) {
	p.tierMu.Lock()
	defer p.tierMu.Unlock()
	if p.tiers.rules == nil {
		return metrics.RulePackets{}, false
	}
	c, ok, err := p.tiers.rules.Counted()
	if err != nil {
		klog.ErrorS(err, "Metrics lack what rules count")
	}
	return metrics.RulePackets{InvalidDropped: c.InvalidDropped, LoopbackNodePorts: c.LoopbackNodePorts}, ok
}

// tables is what /metrics asks of the tier, while there is one.
func (p *proxy) tables() (metrics.Tables, bool) {
	p.tierMu.Lock()
	defer p.tierMu.Unlock()
	tier := p.tiers.fast
	if tier == nil {
		return metrics.Tables{}, false
	}
	t := metrics.Tables{ByName: map[string]metrics.Table{}, Unplaced: p.tiers.unplaced(), ClosedSockets: int64(tier.ClosedSockets())}
	for name, u := range tier.Usage() {
		t.ByName[name] = metrics.Table(u)
	}
	packets, err := tier.Packets()
	if err != nil {
		klog.ErrorS(err, "Metrics lack the counters of packets")
	}
	t.Packets = map[string]uint64{}
	for _, c := range packets {
		t.Packets[c.Result] = c.Count
	}
	traffic, err := tier.Traffic()
	if err != nil {
		klog.ErrorS(err, "Metrics lack the counters of Services")
	}
	for _, s := range traffic {
		t.Services = append(t.Services, metrics.Service{
			Namespace: s.Namespace, Name: s.Name, Port: s.Port, Protocol: s.Protocol,
			Connections: s.Connections, Packets: s.Packets, Bytes: s.Bytes,
		})
	}
	return t, true
}
