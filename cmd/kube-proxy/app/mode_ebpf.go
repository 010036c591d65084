// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/component-base/featuregate"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/placement"
)

// ebpfMode serves by eBPF programs, and by rules what those cannot.
type ebpfMode struct{ *host }

func (*ebpfMode) name() capabilities.Mode          { return capabilities.ModeEBPF }
func (*ebpfMode) featureGate() featuregate.Feature { return "" }
func (*ebpfMode) needsRestart(string) bool         { return false }

// needsConntrack is false: programs track connections themselves.
func (*ebpfMode) needsConntrack() bool { return false }

// minFiles is enough for programs, maps, links of some devices, and connections.
const minFiles = 256

// check finds what the errors of the kernel and of libraries do not tell: with too few files, one says that the
// kernel is too old, another that an argument is invalid.
func (*ebpfMode) check(context.Context) error {
	var limit unix.Rlimit // the Go runtime has raised it as far as it may be
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return os.NewSyscallError("getrlimit", err)
	}
	return enoughFiles(limit.Cur)
}

func enoughFiles(limit uint64) error {
	if limit < minFiles {
		return fmt.Errorf("this process may have only %d open files (RLIMIT_NOFILE), and programs and maps need at least %d", limit, minFiles)
	}
	return nil
}

// uses is true for rules if they are the fallback.
func (m *ebpfMode) uses(other capabilities.Mode) bool {
	return other == capabilities.ModeIPTables && !withoutRules(m.config)
}

func (m *ebpfMode) intervals() proxier.RunnerOptions {
	r, e := proxier.DefaultRunnerOptions(), &m.config.Tandem.EBPF
	r.MinInterval, r.MaxInterval = e.MinSyncPeriod.Duration, e.SyncPeriod.Duration
	r.RetryInterval = min(r.RetryInterval, r.MaxInterval)
	return r
}

func (m *ebpfMode) initialize(ctx context.Context) error {
	if err := reserveNodePortRange(ctx, m.host); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Mode ebpf needs CAP_SYS_ADMIN while it runs, to load programs and to find their maps; --init-only cannot replace that")
	return nil
}

func (m *ebpfMode) open(ctx context.Context, p *parts) (activeMode, error) {
	var rules *iptables.Tier
	noRules := errNoFallback
	var opening sync.WaitGroup
	if !m.isShared() && len(fallbackModes(m.config)) > 0 {
		// Meanwhile, since its tools take as long as to load the programs.
		opening.Go(func() { rules, noRules = openRules(ctx, m.host, p, nil) })
	}
	programs, err := m.openPrograms(ctx, p)
	opening.Wait()
	if err != nil {
		if noRules == nil {
			err = errors.Join(err, rules.Close())
		}
		return nil, err
	}
	d := &ebpfDatapath{host: m.host, parts: p, programs: programs, left: m.leftClients(), logger: klog.FromContext(ctx)}
	if m.isShared() {
		logShare(ctx, m.host, d.left)
		d.placed = placement.NewShared(programs, m.config.Tandem.Coexistence.Share())
		return d, nil
	}
	if noRules != nil {
		d.logger.Info("No fallback: SCTP, and Services that do not fit into the eBPF maps, are not served", "reason", noRules.Error())
	}
	some := false
	for o, why := range d.left {
		switch some = some || why != nil; {
		case why == nil:
		case noRules != nil:
			d.logger.Info("Some clients are not served", "clients", proxier.Origin(o), "reason", why.Error())
		default:
			d.logger.Info("Rules serve some clients", "clients", proxier.Origin(o), "reason", why.Error())
		}
	}
	if noRules == nil {
		d.rules, d.placed = rules, placement.New(programs, rules, some)
	}
	return d, nil
}

var errNoFallback = errors.New("--ebpf-fallback=none")

// busyInterval is how often a process checks whether the one before it has ended.
const busyInterval = time.Second

// openPrograms opens the eBPF datapath. It waits until a process before this one has ended:
// during an update of a DaemonSet, two pods can overlap.
func (m *ebpfMode) openPrograms(ctx context.Context, p *parts) (*ebpf.Tier, error) {
	logger := klog.FromContext(ctx)
	if m.cgroup == "" {
		return nil, m.cgroupErr
	}
	opts, err := m.ebpfOptions()
	if err != nil {
		return nil, err
	}
	opts.CgroupRoot, opts.Reporter, opts.Repaired, opts.Disrupted = m.cgroup, p.reporter, p.repaired, p.disrupted
	if err := reserveNodePortRange(ctx, m.host); err != nil {
		logger.Error(err, "Cannot reserve the NodePort range; outgoing connections of this host may get source ports in it", "nodePortRange", opts.NodePortRange)
	}
	for waited := false; ; waited = true {
		tier, err := ebpf.Open(ctx, opts)
		if err == nil {
			logger.Info("Opened the eBPF datapath", "cgroupRoot", m.cgroup, "adopted", tier.Adopted())
			return tier, nil
		}
		if !errors.Is(err, datapath.ErrBusy) {
			return nil, fmt.Errorf("open the eBPF datapath: %w", err)
		}
		if !waited {
			logger.Info("Another process serves this cgroup; waiting for it to end", "cgroupRoot", m.cgroup)
			p.waiting()
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

func (*ebpfMode) what() string { return "programs of mode ebpf" }

// claimPrograms tells the programs of an earlier process that this one is no other kube-proxy,
// whatever its mode. It returns nil where there are none, or none that this process may find.
func claimPrograms(ctx context.Context, h *host) *successor.Claim {
	if h.cgroup == "" {
		return nil
	}
	claim, err := successor.NewClaim(ctx, h.cgroup)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot look for programs of an earlier process", "reason", err.Error())
	}
	return claim
}

// retire has the programs accept no new connections, and removes them once the connections
// that they serve have ended.
func (m *ebpfMode) retire(ctx context.Context, p *parts) error {
	if m.cgroup == "" {
		return nil
	}
	logger := klog.FromContext(ctx)
	if there, err := removal.Attached(m.cgroup); !there || err != nil {
		return err
	}
	tier, err := m.openPrograms(ctx, p)
	if err != nil {
		return errors.Join(err, removal.StopNewConnections(ctx, m.cgroup))
	}
	defer tier.Close()
	logger.Info("eBPF programs accept no new connections (draining); they are removed when the last connection from outside has ended")
	if err := tier.Drain(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	logger.Info("Removed the programs of mode ebpf")
	return nil
}

func (m *ebpfMode) cleanup(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	root, err := m.cgroupRoot()
	if errors.Is(err, capabilities.ErrNoCgroup2) {
		logger.Info("Found no cgroup2 hierarchy, so there are no programs to remove")
		return nil
	}
	if err != nil {
		return err
	}
	removed, err := removal.Cleanup(ctx, root)
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	if len(removed) == 0 {
		logger.Info("Found no programs to remove", "cgroupRoot", root)
		return nil
	}
	logger.Info("Removed eBPF programs and their maps", "cgroupRoot", root, "programs", removed)
	return nil
}

func (m *ebpfMode) forecast(table *proxier.Table) (f forecast) {
	left, rest := m.leftClients(), capabilities.Mode("")
	switch {
	case m.isShared():
		rest = foreign
	case len(fallbackModes(m.config)) > 0 && m.report.Has(capabilities.IPTables):
		rest = capabilities.ModeIPTables
	}
	refused := m.simulate(table, rest == "")
	f.serves = func(d *proxier.Decision, f *proxier.Frontend, o proxier.Origin) serving {
		err := refused(d, f)
		if why := f.LeftOf(o); err == nil && why != "" {
			err = errors.New(why)
		}
		if err == nil {
			err = left[o]
		}
		if err != nil {
			return serving{by: rest, refused: err}
		}
		return serving{by: capabilities.ModeEBPF, bySocket: o != proxier.FromOutside}
	}
	if reservesNodePorts(m.host) {
		nodePorts, err := config.ParsePortRange(m.config.Tandem.EBPF.NodePortRange)
		if err == nil {
			var list string
			if list, err = withNodePorts(nodePorts); list != "" {
				f.setting(reservedPorts, list)
			}
		}
		f.settingsErr = errors.Join(f.settingsErr, err)
	}
	return f
}
