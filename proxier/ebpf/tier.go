// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

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
	// NoSetRetval and NoGetpeername are for kernels that lack them (before
	// Linux 6.1 and 5.8) and for tests.
	NoSetRetval, NoGetpeername bool
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
	writer *writer
	spec   *ciliumebpf.CollectionSpec
	maps   *sockMaps
	// programs are loaded, and attached or about to be.
	programs programs
	// earlier are programs that still serve from other maps; they are
	// replaced once ours hold everything.
	earlier  []attached
	attached bool
	flows    *flows
	adopted  bool
	looked   bool     // after flows, once
	optOuts  []uint64 // of an earlier map that has another size

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
	t.spec, err = loadSpec(t.opts.Sizes, constants{
		hostNetNSCookie: cookie, hostNamespaceOnly: t.opts.HostNamespaceOnly,
		haveSetRetval: !t.opts.NoSetRetval,
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
	kept := t.flowMaps(logger)
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

// flowMaps are those maps of the earlier programs that hold what sockets and
// clients remember. They stay while tables are built anew: what they say of
// backends carries generations that the new tables do not give out again.
func (t *Tier) flowMaps(logger klog.Logger) map[string]*ciliumebpf.Map {
	kept := map[string]*ciliumebpf.Map{}
	for _, e := range t.earlier {
		maps, err := mapsOf(e.program)
		if err != nil {
			logger.Error(err, "Cannot open the maps of an earlier program")
			continue
		}
		for _, name := range []string{"tdm_sock", "tdm_udp_peer", "tdm_optout"} {
			m := maps[name]
			if m == nil || kept[name] != nil {
				continue
			}
			if t.spec.Maps[name].Compatible(m) == nil {
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
	collection, err := ciliumebpf.NewCollectionWithOptions(t.spec, ciliumebpf.CollectionOptions{MapReplacements: given})
	if err != nil {
		return fmt.Errorf("load the programs: %w", err)
	}
	defer collection.Close()
	take := func(name string) *ciliumebpf.Map { return collection.DetachMap(name) }
	t.maps = &sockMaps{
		TdmAffinity: take("tdm_affinity"), TdmBackend: take("tdm_backend"), TdmBeStats: take("tdm_be_stats"),
		TdmFrontend: take("tdm_frontend"), TdmMeta: take("tdm_meta"), TdmOptout: take("tdm_optout"),
		TdmService: take("tdm_service"), TdmSet: take("tdm_set"), TdmSlot: take("tdm_slot"), TdmSock: take("tdm_sock"),
		TdmSvcStats: take("tdm_svc_stats"), TdmUdpPeer: take("tdm_udp_peer"),
	}
	for i, h := range hooks {
		t.programs[i] = collection.DetachProgram(h.program)
	}
	// No program reads these two, so nothing would keep them once this process
	// is gone (BPF_PROG_BIND_MAP, Linux 5.10). Any program that stays does.
	for _, program := range t.programs {
		for _, m := range []*ciliumebpf.Map{t.maps.TdmMeta, t.maps.TdmService} {
			if program == nil {
				continue
			}
			if err := program.BindMap(m); err != nil {
				t.unload()
				return fmt.Errorf("bind %s to a program: %w", m, err)
			}
		}
	}
	tables, err := openTables(t.maps)
	if err != nil {
		t.unload()
		return err
	}
	report := func(proxier.Problem) {}
	if t.opts.Reporter != nil {
		report = t.opts.Reporter.Report
	}
	t.writer = newWriter(tables, t.opts.Sizes, clock.RealClock{}, waitForPrograms, report)
	t.flows = newFlows(t.writer, t.maps.TdmSock, t.opts.ProcRoot, report)
	return nil
}

func (t *Tier) unload() {
	if t.flows != nil {
		t.flows.free()
	}
	t.programs.close()
	if t.writer != nil {
		t.writer.tables.unmap()
	}
	if t.maps != nil {
		t.maps.Close()
	}
	t.programs, t.maps, t.writer, t.flows = programs{}, nil, nil, nil
}

func (t *Tier) attach() error {
	if err := attach(t.cgroup, &t.programs, t.earlier); err != nil {
		return err
	}
	closeAttached(t.earlier)
	t.earlier, t.attached = nil, true
	return nil
}

// Adopted says whether the tables of an earlier process were taken over.
func (t *Tier) Adopted() bool { return t.adopted }

// Run closes flows of removed backends until ctx is done. Without it they stay
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
	found, err := findAttached(t.cgroup)
	if err != nil {
		return err
	}
	defer closeAttached(found)
	var missing programs
	lost := 0
	for i, h := range hooks {
		if t.programs[i] != nil && !slices.ContainsFunc(found, func(a attached) bool { return a.hook == h.attach }) {
			missing[i] = t.programs[i]
			lost++
		}
	}
	if lost == 0 {
		return nil
	}
	klog.FromContext(ctx).Info("Programs were detached by somebody else; attaching them again", "cgroup", t.cgroup.Name(), "programs", lost)
	return attach(t.cgroup, &missing, nil)
}

// Supports implements proxier.Tier.
func (t *Tier) Supports(d *proxier.Decision, f *proxier.Frontend) error {
	if err := supports(d); err != nil {
		return err
	}
	if !carries(f) {
		return fmt.Errorf("the eBPF tier carries ClusterIPs alone, not yet %ss", f.Kind)
	}
	return nil
}

// Usage of the tables, by name.
func (t *Tier) Usage() map[string]Usage { return t.writer.usage() }

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
	return t.cgroup.Close()
}

// Unplaced counts the service ports that do not fit into the maps.
func (t *Tier) Unplaced() int {
	t.writer.mu.RLock()
	defer t.writer.mu.RUnlock()
	return len(t.writer.unplaced)
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
	_, err := detachAll(t.cgroup)
	return err
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
	return detachAll(cgroup)
}

func detachAll(cgroup *os.File) (removed []string, err error) {
	found, err := findAttached(cgroup)
	if err != nil {
		return nil, err
	}
	defer closeAttached(found)
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

// waitForPrograms returns when every BPF program that was running at the call
// has come to its end: an RCU grace period.
func waitForPrograms() {
	// The kernel has no membarrier for us on nohz_full machines. Programs run
	// for microseconds.
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		time.Sleep(50 * time.Millisecond)
	}
}

// ownNetNSCookie is the cookie of the network namespace of the calling thread
// (Linux 5.14; before that, one is not needed but for HostNamespaceOnly).
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
