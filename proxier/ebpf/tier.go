// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/direct"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/optouts"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sockets"
	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer"
)

// Options of the tier.
type Options struct {
	// CgroupRoot is the cgroup2 directory whose processes are served: the root
	// of the hierarchy on a node, a subtree in tests.
	CgroupRoot string
	// Sizes that the maps may have at most.
	Sizes lbmap.Sizes
	// Start are the sizes that they begin with; if it is empty, Sizes, and they do not grow.
	Start lbmap.Sizes
	// MaxMemory is how many bytes all maps together may take when they grow; 0 for any number.
	MaxMemory uint64
	// Left are the clients that others serve: sockets of pods, sockets of this host, and clients
	// outside. Without the last, no programs are attached to devices.
	Left proxier.Clients
	// Shared says that another proxy stays on this node and serves what this one leaves,
	// pods that opted out included where pods are left.
	Shared bool
	// PodDevices are name patterns, as in devices.Named, of pod devices that get programs
	// besides those of network namespaces that opted out. Virtual machines need it.
	PodDevices []string
	// NodePortRange is where NodePorts are allocated from: no connection
	// gets its source port from it.
	NodePortRange datapath.PortRange
	// ProtectNodePorts keeps processes of the host from binding NodePorts.
	ProtectNodePorts bool
	// TCPPeerIsEndpoint leaves TCP sockets the endpoint's address as their peer, which costs less than the Service's.
	TCPPeerIsEndpoint bool
	// Signals has TCP connections of sockets of this node to Services watched: what came of them, and how long that took. It needs
	// sockets that remember what they dialled (not TCPPeerIsEndpoint).
	Signals bool
	// Dispatch is in what form packets of direct server return are sent. They are taken in any.
	Dispatch lbmap.Dispatch
	// DirectSources are prefixes, one of a family, over which the sources of IP in IP are spread, and from which it is taken.
	DirectSources []netip.Prefix
	// ResetRemoved answers clients of removed TCP backends by a reset, instead
	// of leaving their connections alone.
	ResetRemoved bool
	// TC is how programs are attached to devices.
	TC tc.Method
	// Acceleration is whether XDP forwards on uplinks.
	Acceleration datapath.Acceleration
	// Timeouts of flows.
	Timeouts flowtable.Timeouts
	// Ports of this kube-proxy. While no process runs, a process that holds them for YieldGrace
	// is another kube-proxy, to which programs leave new connections; never if it is 0.
	Ports      successor.Ports
	YieldGrace time.Duration
	// These are for kernels that lack a feature (before Linux 6.1, 5.8, 6.7, 5.17, 5.18 and
	// 6.4), and for tests.
	NoSetRetval, NoGetpeername, NoFIBSource, NoLoop, NoConntrack, NoHold bool
	// ProcRoot is where network namespaces are found to close the sockets of
	// removed UDP backends in; /proc if empty.
	ProcRoot string
	// Reporter is told what does not fit; it may be nil.
	Reporter proxier.Reporter
	// Repaired is told of programs that others detached or overtook, once they are in place
	// again; it may be nil.
	Repaired func(proxier.Repair)
	// Disrupted is told of changes of Maglev tables; it may be nil.
	Disrupted func(proxier.Disruption)
}

// packets reports whether programs are attached to devices.
func (o *Options) packets() bool { return !o.Left[proxier.FromOutside] }

// detectsPods reports whether packets are served that pods send without sockets of this kernel.
func (o *Options) detectsPods() bool { return o.packets() && !o.Left[proxier.FromPod] }

// Tier serves frontends by eBPF programs: at sockets of this node, and on devices.
type Tier struct {
	opts   Options
	cgroup *os.File
	lock   io.Closer // nil if it was not acquired
	netns  netns.Namespace
	// hostCookie is that of the network namespace of this process.
	hostCookie uint64
	// generation is replaced when maps grow. Then both gen and mu are held, so either of them is enough to use it.
	generation
	gen    sync.RWMutex
	growth *grower
	// arrivals selects packets of pods that nothing translated; nil if others serve them.
	arrivals *datapath.ArrivalFilter
	writer   *writer.Writer
	signals  lbmap.SignalMap
	// sockets closes sockets that socket programs translated and whose backends are gone.
	sockets   *sockets.Closer
	successor *successor.Map
	// direct probes which backends can be reached by direct server return; nil if others serve clients outside.
	direct *direct.Prober
	// earlier are programs that still serve from other maps; they are
	// replaced once the new maps hold everything.
	earlier  []datapath.Attachment
	attached bool
	adopted  bool
	// lookedAtSockets says that sockets of the time before this process were looked at.
	lookedAtSockets bool

	// mu is held while devices are brought in line, and guards the fields below.
	mu          sync.Mutex
	uplinks     []devices.Device
	podDevices  datapath.PodDevices
	optOuts     *optouts.Set
	waiting     bool // for the first sync, to serve devices
	lastYield   time.Time
	hold        *datapath.Hold     // nil if the kernel lacks it
	troubles    []datapath.Trouble // of the last audit
	accelerated datapath.Accelerated
	audited     atomic.Pointer[[]Uplink]
	probes      probes

	optOutsChanged chan struct{} // SetOptOuts was called

	closing chan struct{}
	closed  bool
	runs    sync.WaitGroup
}

var _ proxier.Tier = (*Tier)(nil)

// Adopted reports whether the tables of an earlier process were taken over.
func (t *Tier) Adopted() bool { return t.adopted }

// Run ends flows that timed out, closes sockets of removed backends, and follows opt-outs,
// until ctx is done.
func (t *Tier) Run(ctx context.Context) {
	t.runs.Add(1)
	defer t.runs.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-t.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	t.runs.Go(func() { successor.Beat(ctx, t.successor) })
	t.runs.Go(func() { t.collectFlows(ctx) })
	t.runs.Go(func() { t.followAttachments(ctx) })
	if t.growth.grows() {
		t.runs.Go(func() { t.followGrowth(ctx) })
	}
	if t.opts.packets() || !t.opts.Left[proxier.FromPod] {
		t.runs.Go(func() { t.followOptOuts(ctx) })
	}
	if t.direct != nil {
		t.runs.Go(func() { t.direct.Run(ctx) })
		t.runs.Go(func() { t.expireDirect(ctx) })
	}
	if t.arrivals != nil {
		t.runs.Go(func() { t.arrivals.Follow(ctx, t.netns, t.serveArrival) })
	}
	t.sockets.Run(ctx)
}

// Sync implements proxier.Tier.
func (t *Tier) Sync(ctx context.Context, update proxier.Update) error {
	// Without a predecessor, what is written first is served first. Programs of
	// other maps serve until these hold everything.
	if !t.attached && len(t.earlier) == 0 {
		t.gen.RLock()
		err := t.attach()
		t.gen.RUnlock()
		if err != nil {
			return err
		}
	}
	stale, err := t.syncTables(ctx, update)
	t.gen.RLock()
	defer t.gen.RUnlock()
	if t.direct != nil && t.writer.HasDirect() {
		t.direct.Wake()
	}
	if t.arrivals != nil {
		err = errors.Join(err, t.arrivals.Cover(update))
	}
	// New maps that are incomplete do not take over: the earlier programs go on.
	if update.Full && (t.attached || err == nil) {
		err = errors.Join(err, t.ensureAttached(ctx))
	}
	if t.attached {
		err = errors.Join(err, t.startDevices(ctx))
	}
	if update.Full && err == nil {
		t.takeBack(ctx)
	}
	// Before the first look, there may be sockets that an earlier process could not
	// close any more.
	if stale || !t.lookedAtSockets || update.Full && t.sockets.Unfinished() {
		t.lookedAtSockets = true
		t.sockets.Wake()
	}
	return err
}

// ensureAttached attaches programs that wait for their maps to be filled, and
// attaches again what another process detached.
func (t *Tier) ensureAttached(ctx context.Context) error {
	if !t.attached {
		return t.attach()
	}
	lost, err := t.hooks.Ensure(t.writer.NeedsGuard())
	t.repairedCgroup(lost, err)
	return errors.Join(err, t.ensureDevices(ctx))
}

// expireDirect keeps the writer's knowledge of direct server return up to date without syncs.
func (t *Tier) expireDirect(ctx context.Context) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		if err := t.writer.ExpireDirect(); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot end that packets in IP packets are taken; trying again")
		}
	}, direct.Interval)
}

// AwaitDirect returns when a service port has direct server return, or ctx is done. It does not return earlier where others serve
// clients outside.
func (t *Tier) AwaitDirect(ctx context.Context) error {
	return wait.PollUntilContextCancel(ctx, direct.Interval, true, func(context.Context) (bool, error) {
		return t.direct != nil && t.writer.HasDirect(), nil
	})
}

// SetCluster has packets of direct server return be taken from nodes of the cluster alone, and connections of nodes and pods be
// masqueraded. Until it is called, nodes are those that an earlier process named, or any senders.
func (t *Tier) SetCluster(c proxier.Cluster) error { return t.writer.SetCluster(c) }

// Supports implements proxier.Tier.
func (t *Tier) Supports(d *proxier.Decision, f *proxier.Frontend) error {
	return writer.Supports(d, f)
}

// Close ends Run and releases everything in this process. Kernel state stays. No other method
// may be running or be called afterwards.
func (t *Tier) Close() error {
	if t.closed {
		return nil
	}
	t.closed = true
	close(t.closing)
	t.runs.Wait()
	datapath.CloseAttached(t.earlier)
	t.earlier = nil
	t.unload()
	if t.lock != nil {
		defer t.lock.Close()
	}
	return errors.Join(t.netns.Close(), t.cgroup.Close())
}

// CloseUntranslated closes these UDP sockets soon, as far as the programs would serve them if
// they were opened now. It is for those that are connected to a frontend itself since
// before the programs were there, and whose packets nothing translates any more.
func (t *Tier) CloseUntranslated(pairs []sockets.Pair) {
	t.sockets.CloseSoon(pairs)
}

// Cleanup implements proxier.Tier: it detaches the programs, and with them
// all other kernel state of the proxy goes.
func (t *Tier) Cleanup(context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.attached = false // the audit would attach everything again
	t.stopHold()
	return t.netns.Do(func() error {
		_, err := removal.Programs(t.cgroup, datapath.DetachDevices)
		return err
	})
}

func (t *Tier) attach() error {
	if err := t.hooks.Attach(t.earlier); err != nil {
		return err
	}
	datapath.CloseAttached(t.earlier)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.earlier, t.attached, t.waiting = nil, true, true
	return nil
}
