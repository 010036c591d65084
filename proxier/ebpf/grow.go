// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sizing"
)

const (
	// growInterval is the time between two looks at what programs fill, which costs some loads from memory; peersInterval that
	// between two counts of the entries of tdm_udp_peer.
	growInterval  = 250 * time.Millisecond
	peersInterval = 5 * time.Second
	// growAgain is the time after which maps that could not grow are tried again.
	growAgain = time.Minute
	// growRounds is the number of steps within one sync: what waits for one table may need another one, too.
	growRounds = 4
)

// grower decides when maps grow.
type grower struct {
	limits sizing.Limits
	mu     sync.Mutex // held during a step, and acquired before the locks of the tier
	failed time.Time  // of the last step that failed
	steps  atomic.Uint64
	peers  atomic.Int64 // entries of tdm_udp_peer, as last counted
	births births
}

// births is how many flows begin. The ring of young flows has to hold them until they are established.
type births struct {
	table     *flowtable.Table // that the count is of
	count     uint64
	at        time.Time
	perSecond atomic.Int64
}

// look counts the flows that began since the last look.
func (b *births) look(table *flowtable.Table, now time.Time) {
	count := table.Count(lbmap.FlowBorn)
	if b.table == table && now.After(b.at) {
		b.perSecond.Store(int64(float64(count-b.count) / now.Sub(b.at).Seconds()))
	}
	b.table, b.count, b.at = table, count, now
}

func newGrower(o *Options) *grower {
	if o.Start == (lbmap.Sizes{}) {
		return &grower{limits: sizing.Fixed(o.Sizes)}
	}
	return &grower{limits: sizing.Limits{Start: o.Start.Or(o.Sizes), Most: o.Sizes, Memory: o.MaxMemory}}
}

func (g *grower) grows() bool { return g.limits.Start != g.limits.Most }

// Growth is the memory of all maps.
type Growth struct {
	// Bytes that they take, as estimated, and that they may take; 0 for any number.
	Bytes, MaxBytes uint64
	// Steps counts how often maps grew since this process started.
	Steps uint64
}

// Growth says how much memory the maps take.
func (t *Tier) Growth() Growth {
	t.gen.RLock()
	defer t.gen.RUnlock()
	return Growth{Bytes: sizing.Memory(t.sizes), MaxBytes: t.growth.limits.Memory, Steps: t.growth.steps.Load()}
}

// syncTables writes the update. What does not fit is written once the maps have grown, as far as they can.
func (t *Tier) syncTables(ctx context.Context, update proxier.Update) (stale bool, err error) {
	stale, err = t.writer.Sync(update)
	for range growRounds {
		if !t.growth.grows() {
			break
		}
		if _, short := t.writer.Wants(); !short {
			break
		}
		t.growAsNeeded(ctx)
		again, errAgain := t.writer.Sync(proxier.Update{})
		stale, err = stale || again, errors.Join(err, errAgain)
	}
	return stale, err
}

// followGrowth has maps grow before they are full, until ctx is done.
func (t *Tier) followGrowth(ctx context.Context) {
	ticker := time.NewTicker(growInterval)
	defer ticker.Stop()
	counted := time.Time{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if time.Since(counted) >= peersInterval {
			counted = time.Now()
			t.countPeers()
		}
		t.gen.RLock()
		t.growth.births.look(t.flowTable, time.Now())
		t.gen.RUnlock()
		t.growAsNeeded(ctx)
	}
}

// countPeers counts the entries of tdm_udp_peer, unless it cannot grow any more.
func (t *Tier) countPeers() {
	t.gen.RLock()
	defer t.gen.RUnlock()
	if t.sizes.UDPPeers == t.growth.limits.Most.UDPPeers {
		return
	}
	if n, err := lbmap.CountEntries[lbmap.UDPPeerKey, lbmap.UDPPeer](t.maps["tdm_udp_peer"]); err == nil { // the next count may succeed
		t.growth.peers.Store(int64(n))
	}
}

// growAsNeeded has maps grow that are nearly full, or too small for what waits for them. What cannot grow is not waited for.
func (t *Tier) growAsNeeded(ctx context.Context) {
	t.growth.mu.Lock()
	defer t.growth.mu.Unlock()
	limits := &t.growth.limits
	holds, short := t.holds()
	next := limits.Next(t.sizes, holds, sizing.Memory)
	switch failed := !t.growth.failed.IsZero(); {
	case failed && time.Since(t.growth.failed) < growAgain:
		return
	case failed:
		t.growth.failed = time.Time{}
		t.writer.SetReach(limits.Most) // the next full sync finds out what waits
	}
	if next == t.sizes {
		if short {
			t.writer.SetReach(t.sizes)
		}
		return
	}
	if err := t.grow(ctx, next); err != nil {
		if ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Cannot make larger eBPF maps; trying again", "interval", growAgain)
		}
		t.growth.failed = time.Now()
		t.writer.SetReach(t.sizes)
		return
	}
	t.writer.SetReach(limits.Most)
}

// holds is what the maps hold, and what they would hold if everything fitted. It is called with growth.mu held.
func (t *Tier) holds() (holds lbmap.Sizes, short bool) {
	t.gen.RLock()
	defer t.gen.RUnlock()
	holds, short = t.writer.Wants()
	// An LRU map evicts entries before it is full.
	holds.UDPPeers = uint32(2 * t.growth.peers.Load())
	f := t.flowTable
	tcp, udp := uint32(f.Count(lbmap.FlowKeptTCP)), uint32(f.Count(lbmap.FlowKeptUDP))
	holds.TCPFlows, holds.UDPFlows = tcp, udp
	holds.YoungFlows = uint32(t.growth.births.perSecond.Load())
	return holds, short
}

// grow replaces maps by larger ones with the same contents, and the programs by such that use these. Programs are loaded before
// anything waits for that.
func (t *Tier) grow(ctx context.Context, sizes lbmap.Sizes) error {
	began, before := time.Now(), sizing.Memory(t.sizes)
	next, err := t.larger(ctx, sizes)
	if err != nil {
		return err
	}
	loaded := time.Now()
	t.gen.Lock()
	defer t.gen.Unlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	earlier := t.generation
	if err := t.writer.Move(func(tables *lbmap.Tables) (*lbmap.Tables, error) { return t.moveTo(ctx, next, tables) }); err != nil {
		next.close()
		return err
	}
	earlier.borrowed, t.borrowed = next.borrowed, nil
	earlier.close()
	after := sizing.Memory(sizes)
	klog.FromContext(ctx).Info("Replaced eBPF maps by larger ones", "sizes", sizing.Changes(earlier.sizes, sizes), "bytesBefore", before, "bytes", after, "loaded", loaded.Sub(began), "replaced", time.Since(loaded))
	t.growth.steps.Add(1)
	return nil
}

// larger loads the programs of a generation of these sizes. Maps that stay as they are are those of the present one.
func (t *Tier) larger(ctx context.Context, sizes lbmap.Sizes) (generation, error) {
	specs, err := t.loadSpecs(sizes)
	if err != nil {
		return generation{}, err
	}
	sized := lbmap.TableSizes(sizes)
	maps.Copy(sized, flowtable.MapSizes(sizes))
	given := maps.Clone(t.maps)
	maps.DeleteFunc(given, func(name string, m *ciliumebpf.Map) bool {
		size, ok := sized[name]
		return ok && size != m.MaxEntries()
	})
	if sizes.TCPFlows != t.sizes.TCPFlows { // maps of flows belong together
		for _, name := range flowtable.MapNames {
			delete(given, name)
		}
	}
	next, err := t.loadGeneration(ctx, sizes, specs, given, true)
	if err != nil {
		return next, err
	}
	t.mu.Lock()
	variants := slices.Collect(maps.Keys(t.devices.Loaded))
	accelerates := t.devices.Accelerates()
	t.mu.Unlock()
	for _, v := range variants {
		if _, err := next.devices.Programs(ctx, v); err != nil {
			next.close()
			return generation{}, err
		}
	}
	if accelerates {
		_, _ = next.devices.XDP(ctx) // where that fails, the other programs serve
	}
	return next, nil
}

// moveTo attaches the programs of another generation, after copying the tables into its maps. It is called while nothing changes
// the tables, with gen and mu held.
func (t *Tier) moveTo(ctx context.Context, next generation, tables *lbmap.Tables) (*lbmap.Tables, error) {
	into, err := lbmap.OpenTables(next.maps)
	if err != nil {
		return nil, err
	}
	earlier := t.generation
	copied, err := lbmap.CopyTables(earlier.maps, next.maps, tables, into)
	if err != nil {
		into.Unmap()
		return nil, err
	}
	if err := t.replaceHooks(next.hooks, earlier.hooks); err != nil {
		into.Unmap()
		return nil, err
	}
	t.generation = next
	t.probes.reset()
	t.flowTable.CountFor(into)
	logger := klog.FromContext(ctx)
	if t.attached && !t.waiting {
		if err := t.serveDevices(ctx); err != nil {
			logger.Error(err, "Cannot replace programs on some devices by those of larger maps; the next full sync tries again")
		}
		if earlier.maps["tdm_flow"] != next.maps["tdm_flow"] {
			t.replaceHold(ctx)
		}
	}
	datapath.WaitForPrograms()
	if err := copied.Finish(); err != nil {
		logger.Error(err, "Some counters or affinities did not get into larger maps")
	}
	return into, nil
}

// replaceHooks attaches programs to the cgroup in place of others, or leaves those.
func (t *Tier) replaceHooks(next, earlier *datapath.CgroupHooks) error {
	if !t.attached {
		return nil
	}
	err := next.Replace()
	if err == nil && earlier.Guarded() {
		err = next.Guard()
	}
	if err != nil {
		return errors.Join(err, earlier.Replace())
	}
	return nil
}

// collectFlows removes flows that timed out, until ctx is done.
func (t *Tier) collectFlows(ctx context.Context) {
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(flowtable.CollectInterval)
	defer ticker.Stop()
	for {
		t.gen.RLock()
		if t.flowTable.Used() > 0 {
			if _, err := t.flowTable.Sweep(ctx, &t.opts.Timeouts, flowtable.MonotonicSeconds()); err != nil && ctx.Err() == nil {
				logger.Error(err, "Cannot remove flows that timed out; trying again", "interval", flowtable.CollectInterval)
			}
		}
		t.gen.RUnlock()
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}
