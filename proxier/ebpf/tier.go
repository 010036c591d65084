// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
)

// Options of the tier.
type Options struct {
	// CgroupRoot is the cgroup2 directory whose processes are served: the root
	// of the hierarchy on a node, a subtree in tests.
	CgroupRoot string
	// Sizes of the maps.
	Sizes Sizes
	// HostNamespaceOnly leaves the sockets of pods alone.
	HostNamespaceOnly bool
	// NoPackets leaves everything that does not pass a socket of this node
	// alone.
	NoPackets bool
	// PodDevices are patterns, as in uplinks.Named, of devices of pods whose
	// packets are to be looked at besides those of network namespaces that are
	// opted out: of virtual machines, for one.
	PodDevices []string
	// NodePortRange is where NodePorts are allocated from: no source port of
	// ours is out of it.
	NodePortRange PortRange
	// ProtectNodePorts keeps processes of the host from binding NodePorts.
	ProtectNodePorts bool
	// ResetRemoved answers clients of removed TCP backends by a reset, instead
	// of leaving their connections alone.
	ResetRemoved bool
	// TC is how programs get on devices.
	TC tc.Method
	// Timeouts of flows.
	Timeouts FlowTimeouts
	// These are for kernels that lack something (before Linux 6.1, 5.8, 6.7, 5.17 and
	// 5.18), and for tests.
	NoSetRetval, NoGetpeername, NoFIBSource, NoLoop, NoConntrack bool
	// ProcRoot is where network namespaces are found to close the sockets of
	// removed UDP backends in; /proc if empty.
	ProcRoot string
	// Reporter is told what does not fit; nil for nobody.
	Reporter proxier.Reporter
}

// Tier carries frontends in eBPF programs at the socket layer.
type Tier struct {
	opts   Options
	cgroup *os.File
	netns  netns.Namespace
	writer *writer
	spec   *ciliumebpf.CollectionSpec
	maps   *sockMaps
	// programs are loaded, and attached or about to be.
	programs programs
	// earlier are programs that still serve from other maps; they are
	// replaced once ours hold everything.
	earlier  []attached
	attached bool
	waiting  bool // for the first sync, to serve devices
	guarded  bool // guardHook is
	flows    *flows
	// flowMaps are those that only packet programs use; they are bound to the
	// others.
	flowMaps  map[string]*ciliumebpf.Map
	flowTable *flowTable
	// mu is held while devices are brought in line.
	mu      sync.Mutex
	packets *packets
	uplinks []devices.Device
	pods    podDevices
	adopted bool
	looked  bool     // after flows, once
	optOuts []uint64 // of an earlier map that has another size

	closing chan struct{}
	closed  bool
	runs    sync.WaitGroup
}

var _ proxier.Tier = (*Tier)(nil)

// ErrBusy says that another process carries this cgroup.
var ErrBusy = errors.New("another process serves this cgroup")

// Open loads the programs and takes over from a process before this one, if
// there was any: then everything goes on as it left it. Without a predecessor
// nothing is attached before the first Sync. It needs CAP_SYS_ADMIN, since
// the kernel opens programs and maps by id for nobody else, and CAP_NET_ADMIN;
// before Linux 5.11 also CAP_SYS_RESOURCE, to lock memory.
func Open(ctx context.Context, opts Options) (*Tier, error) {
	opts.Sizes, opts.Timeouts = opts.Sizes.orDefaults(), opts.Timeouts.orDefaults()
	opts.ProcRoot = cmp.Or(opts.ProcRoot, "/proc")
	if err := opts.Sizes.Validate(); err != nil {
		return nil, err
	}
	cgroup, err := openCgroup2(opts.CgroupRoot)
	if err != nil {
		return nil, err
	}
	t := &Tier{opts: opts, cgroup: cgroup, closing: make(chan struct{})}
	if err := t.open(ctx); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

func (t *Tier) open(ctx context.Context) error {
	if err := lock(t.cgroup); err != nil {
		return err
	}
	cookie, err := ownNetNSCookie()
	if err != nil {
		return err
	}
	if t.netns, err = netns.Own(); err != nil {
		return err
	}
	t.spec, err = loadSpec(t.opts.Sizes, constants{
		hostNetNSCookie: cookie, hostNamespaceOnly: t.opts.HostNamespaceOnly,
		protectNodePorts: t.opts.ProtectNodePorts,
		haveSetRetval:    !t.opts.NoSetRetval,
	})
	if err != nil {
		return err
	}
	if t.opts.NoGetpeername {
		delete(t.spec.Programs, "tdm_getpeer4")
		delete(t.spec.Programs, "tdm_getpeer6")
	}
	if t.earlier, err = findAttached(t.cgroup); err != nil {
		return err
	}
	// It is large, and of no use once the programs are loaded.
	defer func() { t.spec = nil }()
	logger := klog.FromContext(ctx)
	if len(t.earlier) > 0 {
		why := t.adopt()
		if why == nil {
			t.adopted = true
			return t.attach()
		}
		logger.Info("The maps in the kernel cannot be taken over; building new ones beside them", "reason", why)
	}
	kept := t.keptMaps(logger)
	defer closeMaps(kept) // the collection has its own
	if err := t.load(kept); err != nil {
		return err
	}
	for _, cookie := range t.optOuts {
		if err := t.maps.TdmOptout.Put(cookie, uint8(1)); err != nil {
			logger.Error(err, "An opt-out does not fit into the new map", "netNSCookie", cookie)
		}
	}
	t.writer.tables.meta.Generation = uint32(time.Now().Unix()) | 1
	t.writer.tables.meta.Layout = layoutVersion
	t.writer.tables.meta.Magic = metaMagic
	return nil // attached by Sync
}

// lock keeps two processes from writing the same maps. It goes with the
// process, however it ends.
func lock(cgroup *os.File) error {
	// Somebody who only wants to know whether it is taken holds it for a moment.
	for deadline := time.Now().Add(100 * time.Millisecond); ; time.Sleep(5 * time.Millisecond) {
		switch err := unix.Flock(int(cgroup.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock %s: %w", cgroup.Name(), err)
		case time.Now().After(deadline):
			return fmt.Errorf("%w: %s", ErrBusy, cgroup.Name())
		}
	}
}

// adopt loads the programs onto the maps of the earlier ones.
func (t *Tier) adopt() error {
	maps, err := mapsOf(t.earlier[0].program)
	if err != nil {
		return err
	}
	// Not every program uses every map.
	for _, e := range t.earlier[1:] {
		more, err := mapsOf(e.program)
		if err != nil {
			closeMaps(maps)
			return err
		}
		for name, m := range more {
			if _, known := maps[name]; known {
				m.Close()
				continue
			}
			maps[name] = m
		}
	}
	defer closeMaps(maps)
	replacements := map[string]*ciliumebpf.Map{}
	for name, spec := range t.spec.Maps {
		if !isOurs(name) {
			continue
		}
		m := maps[name]
		if m == nil {
			return fmt.Errorf("map %s is missing", name)
		}
		if err := spec.Compatible(m); err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
		replacements[name] = m
	}
	for name, m := range maps {
		if replacements[name] == nil {
			replacements[name] = m // openFlowMaps looks at them
		}
	}
	if err := t.load(replacements); err != nil {
		return err
	}
	if err := t.writer.load(); err != nil {
		t.unload()
		return err
	}
	return nil
}

func isOurs(name string) bool {
	return len(name) > len(namePrefix) && name[:len(namePrefix)] == namePrefix
}

// keptMaps are those maps of the earlier programs that hold what sockets and
// clients remember. They stay while tables are built anew: what they say of
// backends carries generations that the new tables do not give out again.
func (t *Tier) keptMaps(logger klog.Logger) map[string]*ciliumebpf.Map {
	kept := map[string]*ciliumebpf.Map{}
	for _, e := range t.earlier {
		maps, err := mapsOf(e.program)
		if err != nil {
			logger.Error(err, "Cannot open the maps of an earlier program")
			continue
		}
		for _, name := range append([]string{"tdm_sock", "tdm_udp_peer", "tdm_optout"}, flowMapNames...) {
			m := maps[name]
			if m == nil || kept[name] != nil {
				continue
			}
			// Of the maps of flows, openFlowMaps knows what fits.
			if spec := t.spec.Maps[name]; spec == nil || spec.Compatible(m) == nil {
				kept[name] = m
				delete(maps, name)
			} else if name == "tdm_optout" {
				t.optOuts = readOptOuts(m)
			}
		}
		closeMaps(maps)
	}
	return kept
}

// load loads programs and those maps that are not given.
func (t *Tier) load(given map[string]*ciliumebpf.Map) error {
	replacements := map[string]*ciliumebpf.Map{}
	for name, m := range given {
		if t.spec.Maps[name] != nil {
			replacements[name] = m
		}
	}
	collection, err := ciliumebpf.NewCollectionWithOptions(t.spec, ciliumebpf.CollectionOptions{MapReplacements: replacements})
	if err != nil {
		return fmt.Errorf("load the programs: %w", err)
	}
	defer collection.Close()
	take := func(name string) *ciliumebpf.Map { return collection.DetachMap(name) }
	t.maps = &sockMaps{
		TdmAffinity: take("tdm_affinity"), TdmBackend: take("tdm_backend"), TdmBeStats: take("tdm_be_stats"),
		TdmFrontend: take("tdm_frontend"), TdmLocal: take("tdm_local"), TdmMeta: take("tdm_meta"), TdmNode: take("tdm_node"),
		TdmOptout: take("tdm_optout"), TdmRange: take("tdm_range"),
		TdmService: take("tdm_service"), TdmSet: take("tdm_set"), TdmSlot: take("tdm_slot"), TdmSock: take("tdm_sock"),
		TdmSvcStats: take("tdm_svc_stats"), TdmUdpPeer: take("tdm_udp_peer"),
	}
	for i, h := range hooks {
		t.programs[i] = collection.DetachProgram(h.program)
	}
	if err := t.openFlowMaps(given); err != nil {
		t.unload()
		return err
	}
	if err := t.bindMaps(); err != nil {
		t.unload()
		return err
	}
	tables, err := openTables(t.maps)
	if err != nil {
		t.unload()
		return err
	}
	tables.vips = kernelMap[[4]uint32, uint8]{t.flowMaps["tdm_vip"]}
	report := func(proxier.Problem) {}
	if t.opts.Reporter != nil {
		report = t.opts.Reporter.Report
	}
	t.writer = newWriter(tables, t.opts.Sizes, clock.RealClock{}, waitForPrograms, report)
	t.writer.guard = t.guard
	t.flowTable.tables = tables
	t.flows = newFlows(t.writer, t.maps.TdmSock, t.opts.ProcRoot, reach{
		cgroup: t.cgroup, netns: t.netns, optOuts: t.maps.TdmOptout, hostOnly: t.opts.HostNamespaceOnly,
	}, report)
	var ephemeral PortRange
	if err := t.netns.Do(func() (err error) { ephemeral, err = EphemeralPorts(); return err }); err != nil {
		t.unload()
		return err
	}
	t.packets = newPackets(t.mapsByName(), &t.opts, newSNATPool(t.opts.NodePortRange, ephemeral))
	return nil
}

// bindMaps has the socket programs hold maps that they do not use: nothing else
// would keep those once this process is gone, or tell the next one where they
// are (BPF_PROG_BIND_MAP, Linux 5.10). Any program that stays does.
func (t *Tier) bindMaps() error {
	maps := append(slices.Collect(maps.Values(t.flowMaps)), t.maps.TdmMeta, t.maps.TdmService)
	for _, program := range t.programs {
		if program == nil {
			continue
		}
		for _, m := range maps {
			if err := program.BindMap(m); err != nil {
				return fmt.Errorf("bind %s to a program: %w", m, err)
			}
		}
	}
	return nil
}

// openFlowMaps takes over the maps that only packet programs use, or makes them.
func (t *Tier) openFlowMaps(given map[string]*ciliumebpf.Map) error {
	spec, err := packetSpec()
	if err != nil {
		return err
	}
	for name, size := range t.opts.Sizes.flowMaps() {
		spec.Maps[name].MaxEntries = size
	}
	// Flows are of use all together.
	keep := !slices.ContainsFunc(flowMapNames, func(name string) bool {
		return given[name] == nil || spec.Maps[name].Compatible(given[name]) != nil
	})
	t.flowMaps = map[string]*ciliumebpf.Map{}
	for name, m := range spec.Maps {
		if !isOurs(name) || t.spec.Maps[name] != nil {
			continue
		}
		isFlow := slices.Contains(flowMapNames, name)
		if g := given[name]; g != nil && (isFlow && keep || !isFlow && m.Compatible(g) == nil) {
			t.flowMaps[name], err = g.Clone()
		} else {
			t.flowMaps[name], err = ciliumebpf.NewMap(m)
		}
		if err != nil {
			return fmt.Errorf("make map %s: %w", name, err)
		}
	}
	if t.flowTable, err = openFlowTable(t.flowMaps); err != nil {
		return err
	}
	return t.flowTable.recover(waitForPrograms)
}

// mapsByName are all maps. They stay the tier's.
func (t *Tier) mapsByName() map[string]*ciliumebpf.Map {
	m := t.maps
	all := map[string]*ciliumebpf.Map{
		"tdm_affinity": m.TdmAffinity, "tdm_backend": m.TdmBackend, "tdm_be_stats": m.TdmBeStats, "tdm_frontend": m.TdmFrontend,
		"tdm_local": m.TdmLocal, "tdm_meta": m.TdmMeta, "tdm_node": m.TdmNode, "tdm_optout": m.TdmOptout, "tdm_range": m.TdmRange,
		"tdm_service": m.TdmService, "tdm_set": m.TdmSet, "tdm_slot": m.TdmSlot, "tdm_sock": m.TdmSock,
		"tdm_svc_stats": m.TdmSvcStats, "tdm_udp_peer": m.TdmUdpPeer,
	}
	for name, m := range t.flowMaps {
		all[name] = m
	}
	return all
}

func (t *Tier) unload() {
	if t.flows != nil {
		t.flows.free()
	}
	t.programs.close()
	if t.packets != nil {
		t.packets.close()
	}
	if t.flowTable != nil {
		t.flowTable.unmap()
	}
	closeMaps(t.flowMaps)
	if t.writer != nil {
		t.writer.tables.unmap()
	}
	if t.maps != nil {
		t.maps.Close()
	}
	t.programs, t.maps, t.writer, t.flows = programs{}, nil, nil, nil
	t.packets, t.flowTable, t.flowMaps = nil, nil, nil
}

func (t *Tier) attach() error {
	always := t.programs
	always[guardHook] = nil
	if err := attach(t.cgroup, &always, t.earlier); err != nil {
		return err
	}
	closeAttached(t.earlier)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.earlier, t.attached, t.waiting = nil, true, !t.opts.NoPackets
	return nil
}

// startDevices has programs on devices for the first time. They take longer to
// load than sockets can wait for their frontends.
func (t *Tier) startDevices(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.waiting {
		return nil
	}
	t.waiting = false
	// What is not found now is looked for again soon.
	_ = t.findPodDevices(ctx)
	return t.serveDevices(ctx)
}

// guard has the packets of sockets looked at.
func (t *Tier) guard() error {
	if t.guarded {
		return nil
	}
	found, err := findAttached(t.cgroup)
	if err != nil {
		return err
	}
	defer closeAttached(found)
	var only programs
	only[guardHook] = t.programs[guardHook]
	if err := attach(t.cgroup, &only, found); err != nil {
		return err
	}
	t.guarded = true
	return nil
}

// SetUplinks says by which devices node traffic comes in; all others are left
// alone. It may be called at any time before Close.
func (t *Tier) SetUplinks(list []devices.Device) error {
	if t.opts.NoPackets {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.uplinks = list
	// Programs of an earlier process serve until our maps hold everything.
	if !t.attached || t.waiting {
		return nil
	}
	return t.serveDevices(context.Background())
}

// Adopted says whether the tables of an earlier process were taken over.
func (t *Tier) Adopted() bool { return t.adopted }

// Run closes flows of removed backends, and strays, until ctx is done. Without it they stay
// open.
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
	t.runs.Go(func() { t.flowTable.collect(ctx, t.opts.Timeouts) })
	if !t.opts.NoPackets {
		t.runs.Go(func() { t.followOptOuts(ctx) })
	}
	t.flows.run(ctx)
}

// Sync implements proxier.Tier.
func (t *Tier) Sync(ctx context.Context, update proxier.Update) error {
	// Nobody serves yet: what is written first serves first. Where programs
	// of other maps serve, they do until ours hold everything.
	if !t.attached && len(t.earlier) == 0 {
		if err := t.attach(); err != nil {
			return err
		}
	}
	stale, err := t.writer.sync(update)
	// New maps that lack something do not take over: what serves goes on.
	if update.Full && (t.attached || err == nil) {
		err = errors.Join(err, t.ensureAttached(ctx))
	}
	if t.attached {
		err = errors.Join(err, t.startDevices(ctx))
	}
	// The first time there may be what a process before this one could not
	// close any more.
	if stale || !t.looked || update.Full && t.flows.unfinished() {
		t.looked = true
		t.flows.look()
	}
	return err
}

// ensureAttached attaches programs that wait for their maps to be filled, and
// puts back what somebody else took away.
func (t *Tier) ensureAttached(ctx context.Context) error {
	if !t.attached {
		return t.attach()
	}
	return errors.Join(t.ensureHooks(ctx), t.ensureDevices(ctx))
}

func (t *Tier) ensureDevices(ctx context.Context) error {
	if t.opts.NoPackets {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting {
		return nil
	}
	return t.netns.Do(func() error {
		return errors.Join(t.packets.audit(ctx), t.packets.serve(ctx, t.uplinks, t.pods.on))
	})
}

// serveDevices is called with mu held.
func (t *Tier) serveDevices(ctx context.Context) error {
	return t.netns.Do(func() error { return t.packets.serve(ctx, t.uplinks, t.pods.on) })
}

func (t *Tier) ensureHooks(ctx context.Context) error {
	found, err := findAttached(t.cgroup)
	if err != nil {
		return err
	}
	defer closeAttached(found)
	if !t.guarded || !t.writer.guarded() {
		t.guarded = false
		for _, a := range found {
			if a.hook == hooks[guardHook].attach {
				err = errors.Join(err, detach(t.cgroup, a))
			}
		}
	}
	var missing programs
	lost := 0
	for i, h := range hooks {
		if i == guardHook && !t.guarded {
			continue
		}
		if t.programs[i] != nil && !slices.ContainsFunc(found, func(a attached) bool { return a.hook == h.attach }) {
			missing[i] = t.programs[i]
			lost++
		}
	}
	if lost == 0 {
		return err
	}
	klog.FromContext(ctx).Info("Programs were detached by somebody else; attaching them again", "cgroup", t.cgroup.Name(), "programs", lost)
	return errors.Join(err, attach(t.cgroup, &missing, nil))
}

// Supports implements proxier.Tier.
func (t *Tier) Supports(d *proxier.Decision, f *proxier.Frontend) error { return supports(d) }

// Usage of the tables, by name.
func (t *Tier) Usage() map[string]Usage {
	all := t.writer.usage()
	f := t.flowTable
	all["flows"] = Usage{f.used(), f.limit()}
	all["tcp_flows"] = Usage{int(f.count(flowKeptTCP)), int(t.opts.Sizes.TCPFlows)}
	all["udp_flows"] = Usage{int(f.count(flowKeptUDP)), int(t.opts.Sizes.UDPFlows)}
	return all
}

// Close ends Run and lets go of everything in this process. What is in the
// kernel stays. No other method may be running or be called afterwards.
func (t *Tier) Close() error {
	if t.closed {
		return nil
	}
	t.closed = true
	close(t.closing)
	t.runs.Wait()
	closeAttached(t.earlier)
	t.earlier = nil
	t.unload()
	return errors.Join(t.netns.Close(), t.cgroup.Close())
}

// Unplaced are the service ports that do not fit into the maps, by Decision.Index, and
// why.
func (t *Tier) Unplaced() map[uint32]error {
	t.writer.mu.RLock()
	defer t.writer.mu.RUnlock()
	if len(t.writer.unplaced) == 0 {
		return nil
	}
	all := make(map[uint32]error, len(t.writer.unplaced))
	for index, code := range t.writer.unplaced {
		all[index] = errors.New(code.String())
	}
	return all
}

// CloseStrays closes these UDP sockets soon, as far as the programs would serve them if
// they were opened now. It is for those that are connected to a frontend itself since
// before the programs were there, when nobody translates their packets any more.
func (t *Tier) CloseStrays(pairs []SocketPair) {
	t.flows.addStrays(setOf(pairs))
	t.flows.look()
}

// ClosedSockets counts the UDP sockets that were closed because their backend
// was gone.
func (t *Tier) ClosedSockets() uint64 {
	t.flows.mu.Lock()
	defer t.flows.mu.Unlock()
	return t.flows.closed
}

// Cleanup implements proxier.Tier: it detaches the programs, and with them
// everything else of ours goes.
func (t *Tier) Cleanup(context.Context) error {
	t.attached = false
	return t.netns.Do(func() error {
		_, err := detachAll(t.cgroup, detachDevices)
		return err
	})
}

// Cleanup removes what processes before left on a cgroup, and returns the
// names of the programs it detached. Programs of others stay as they are.
func Cleanup(cgroupRoot string) (removed []string, err error) {
	cgroup, err := openCgroup2(cgroupRoot)
	if err != nil {
		return nil, err
	}
	defer cgroup.Close()
	// A process that still runs would attach its programs again.
	if err := lock(cgroup); err != nil {
		return nil, err
	}
	return detachAll(cgroup, detachDevices)
}

// detachAll takes our programs off all devices, by that function, and then off the cgroup.
// Those on the cgroup are the mark by which the others are found, so they stay until those
// have gone; but they lead to nobody any more.
func detachAll(cgroup *os.File, devices func() (removed []string, err error)) (removed []string, err error) {
	found, err := findAttached(cgroup)
	if err != nil {
		return nil, err
	}
	defer closeAttached(found)
	if removed, err = devices(); err != nil {
		return removed, errors.Join(err, silence(cgroup))
	}
	var errs []error
	for _, a := range found {
		if err := detach(cgroup, a); err != nil {
			errs = append(errs, err)
			continue
		}
		if info, err := a.program.Info(); err == nil {
			removed = append(removed, info.Name)
		}
	}
	return removed, errors.Join(errs...)
}

// detachDevices takes our programs off every device of this network namespace.
func detachDevices() (removed []string, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		names, err := detachDevice(l.Attrs().Index)
		removed = append(removed, names...)
		errs = append(errs, err)
	}
	return removed, errors.Join(errs...)
}

// waitForPrograms returns when every BPF program that was running at the call
// has come to its end: an RCU grace period. Where one CPU is all there is, the kernel
// does not wait: no program of packets is under way there while user space runs, and
// what programs of sockets may read rests for longer (ripeAfter).
func waitForPrograms() {
	// The kernel has no membarrier for us on nohz_full machines. Programs run
	// for microseconds.
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		time.Sleep(50 * time.Millisecond)
	}
}

// ownNetNSCookie is the cookie of the network namespace of the calling thread
// (Linux 5.14; before that, the host cannot be told from a pod at its socket).
func ownNetNSCookie() (uint64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	}
	if err != nil {
		return 0, fmt.Errorf("open a socket to learn the namespace's cookie: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the namespace's cookie: %w", err)
	}
	return cookie, nil
}

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1
