// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/tc"
)

// role is which side of a device its clients are on: enum role of
// bpf/tc_config.h.
type role uint8

const (
	roleUplink role = iota
	rolePod
)

// variant is what programs are loaded for: all else is alike on all devices.
type variant struct {
	role role
	l3   bool // no Ethernet header
	// pod says that what comes in is of a pod, whatever its address.
	pod bool
}

// directions and their programs.
var packetHooks = [...]struct {
	direction tc.Direction
	program   string
}{
	{tc.Ingress, "tdm_in"},
	{tc.Egress, "tdm_out"},
}

// packetPrograms are loaded programs in the order of packetHooks.
type packetPrograms [len(packetHooks)]*ciliumebpf.Program

func (p *packetPrograms) close() {
	for _, program := range p {
		program.Close()
	}
}

// packets has the programs on devices.
type packets struct {
	maps   map[string]*ciliumebpf.Map // of all programs, by name; not its own
	opts   *Options
	snat   snatPool
	loaded map[variant]*packetPrograms
	// on are the devices that have our programs, by index.
	on map[int]variant
	// leaving are those of them that are not to be served any more, and since
	// when. Their connections go on for a while.
	leaving map[int]time.Time
	linger  [2]time.Duration // by role
	looked  bool             // for what a process before this one left
	// draining says that another proxy serves already.
	draining    bool
	noConntrack bool
	// carriers are at work while programs are replaced that have other flows.
	carriers []*carrier
}

// defaultLinger is how long devices are served that are not to be any more: a
// route that comes and goes must not cost connections, and those of a pod that
// ends its opt-out are still translated where they began.
var defaultLinger = [2]time.Duration{roleUplink: time.Minute, rolePod: time.Hour}

func newPackets(maps map[string]*ciliumebpf.Map, opts *Options, snat snatPool) *packets {
	return &packets{maps: maps, opts: opts, snat: snat, loaded: map[variant]*packetPrograms{}, on: map[int]variant{},
		leaving: map[int]time.Time{}, linger: defaultLinger, noConntrack: opts.NoConntrack}
}

func (p *packets) close() {
	for _, programs := range p.loaded {
		programs.close()
	}
	p.loaded = nil
	p.endCarrying()
}

// programs loads what a variant needs.
func (p *packets) programs(v variant) (*packetPrograms, error) {
	if programs := p.loaded[v]; programs != nil {
		return programs, nil
	}
	var noModule error
	if !p.noConntrack {
		noModule = loadConntrack()
	}
	programs, err := p.load(v)
	if err != nil && !p.noConntrack {
		// It may be a module that is not there, whatever the kernel could do.
		p.noConntrack = true
		var without error
		if programs, without = p.load(v); without == nil {
			klog.Background().Info("Connections that netfilter translates cannot be told from new ones", "reason", errors.Join(err, noModule).Error())
			err = nil
		} else {
			p.noConntrack = false // it was something else, which may pass
		}
	}
	if err != nil {
		return nil, err
	}
	p.loaded[v] = programs
	return programs, nil
}

func (p *packets) load(v variant) (*packetPrograms, error) {
	spec, err := packetSpec()
	if err != nil {
		return nil, err
	}
	var meta metaEntry
	if err := p.maps["tdm_meta"].Lookup(uint32(0), &meta); err != nil {
		return nil, fmt.Errorf("read the generation of the tables: %w", err)
	}
	l2 := uint8(14)
	if v.l3 {
		l2 = 0
	}
	for name, value := range map[string]any{
		"role": uint8(v.role), "l2_len": l2, "from_pod": boolByte(v.pod),
		"max_flows": p.maps["tdm_flow"].MaxEntries(), "max_young": p.maps["tdm_flow_young"].MaxEntries() - maxClosed,
		"max_kept_tcp": uint64(p.opts.Sizes.TCPFlows), "max_kept_udp": uint64(p.opts.Sizes.UDPFlows),
		"snat_ranges": p.snat.bpf(), "snat_ports": uint32(p.snat.usual), "snat_all_ports": uint32(p.snat.all),
		"have_fib_source": boolByte(!p.opts.NoFIBSource), "have_loop": boolByte(!p.opts.NoLoop), "reset_removed": boolByte(p.opts.ResetRemoved),
		"first_generation": meta.Generation,
		"have_conntrack":   boolByte(!p.noConntrack), "draining": boolByte(p.draining),
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	replacements := map[string]*ciliumebpf.Map{}
	for name := range spec.Maps {
		if m := p.maps[name]; m != nil {
			replacements[name] = m
			spec.Maps[name].MaxEntries = m.MaxEntries()
		} else if isOurs(name) {
			delete(spec.Maps, name) // the load fails if a program uses it
		}
	}
	opts := ciliumebpf.CollectionOptions{MapReplacements: replacements}
	if p.noConntrack {
		// The one type of the kernel's that is needed, which may lack BTF.
		opts.Programs.KernelTypes = spec.Types
	}
	collection, err := ciliumebpf.NewCollectionWithOptions(spec, opts)
	if err != nil {
		return nil, fmt.Errorf("load the packet programs: %w", err)
	}
	defer collection.Close()
	programs := &packetPrograms{}
	for i, h := range packetHooks {
		programs[i] = collection.DetachProgram(h.program)
		// By this one they are recognised, and not all of them use it.
		if err := programs[i].BindMap(p.maps["tdm_meta"]); err != nil {
			programs.close()
			return nil, fmt.Errorf("bind tdm_meta to %s: %w", h.program, err)
		}
	}
	return programs, nil
}

// packetSpec is the collection of the packet programs.
func packetSpec() (*ciliumebpf.CollectionSpec, error) {
	spec, err := ciliumebpf.LoadCollectionSpecFromReader(bytes.NewReader(_TcBytes))
	if err != nil {
		return nil, fmt.Errorf("read the packet programs in this binary: %w", err)
	}
	return spec, nil
}

// serve has programs on these devices: uplinks, and those of pods, by index.
// One that cannot be attached to holds up no other.
func (p *packets) serve(ctx context.Context, list []devices.Device, pods map[int]variant) error {
	var errs []error
	want := maps.Clone(pods)
	if want == nil {
		want = map[int]variant{}
	}
	for _, d := range list {
		want[d.Index] = variant{role: roleUplink, l3: d.L3}
	}
	if !p.looked {
		err := p.takeOver(ctx, want)
		p.looked = err == nil
		errs = append(errs, err)
		defer p.endCarrying()
	}
	for index := range want {
		delete(p.leaving, index)
	}
	for index, v := range want {
		if there, ok := p.on[index]; ok && there == v {
			continue
		}
		errs = append(errs, p.begin(index, v))
	}
	for index := range p.on {
		if !has(want, index) {
			errs = append(errs, p.leave(index))
		}
	}
	if len(p.carriers) > 0 {
		waitForPrograms()
		errs = append(errs, p.carry((*carrier).fresh), p.carry((*carrier).settle))
		for _, c := range p.carriers {
			klog.FromContext(ctx).Info("Took connections over into maps of other sizes", "connections", c.carried, "lost", c.lost)
		}
	}
	return errors.Join(errs...)
}

// takeOver takes over what a process before this one left on devices: their
// flows, and devices that are not wanted, as what is there serves from maps that
// may be gone from use.
func (p *packets) takeOver(ctx context.Context, want map[int]variant) error {
	inherited := map[int]variant{}
	err := eachServed(func(device *netlink.LinkAttrs, found []tc.Attachment) error {
		var errs []error
		for _, f := range found {
			errs = append(errs, p.carryFrom(f.Program))
		}
		if !has(want, device.Index) {
			v, err := inheritedVariant(device, found[0].Program)
			if err != nil {
				return errors.Join(append(errs, err)...)
			}
			inherited[device.Index] = v
		}
		return errors.Join(errs...)
	})
	// While flows are in two places it has to be quick. What fails here does again where
	// it is needed.
	for _, devices := range []map[int]variant{want, inherited} {
		for _, v := range devices {
			_, _ = p.programs(v)
		}
	}
	errs := []error{err, p.carry((*carrier).all)}
	for index, v := range inherited {
		errs = append(errs, p.begin(index, v))
	}
	return errors.Join(errs...)
}

// inheritedVariant is what a device is to a program that it has from an earlier process.
// Whether that knows pods by their device matters to new connections alone.
func inheritedVariant(device *netlink.LinkAttrs, program *ciliumebpf.Program) (variant, error) {
	v := variant{role: roleUplink, l3: device.EncapType != "ether"}
	maps, err := mapsOf(program)
	if err != nil {
		return v, err
	}
	defer closeMaps(maps)
	known := maps["tdm_uplink"]
	if known == nil {
		return v, nil // of another version
	}
	var one uint32
	switch err := known.Lookup(uint32(device.Index), &one); {
	case errors.Is(err, ciliumebpf.ErrKeyNotExist):
		v.role = rolePod
	case err != nil:
		return v, fmt.Errorf("look for uplink %s: %w", device.Name, err)
	}
	return v, nil
}

// begin has programs on a device.
func (p *packets) begin(index int, v variant) error {
	// Known before the programs ask.
	err := p.setUplink(index, v.role == roleUplink)
	switch attachErr := p.attach(index, v); {
	case attachErr == nil:
		p.on[index] = v
	case !errors.Is(attachErr, tc.ErrNoDevice):
		err = errors.Join(err, fmt.Errorf("device %d: %w", index, attachErr))
	}
	return err
}

// setUplink has the programs know which devices are uplinks.
func (p *packets) setUplink(index int, is bool) error {
	var err error
	if is {
		err = p.maps["tdm_uplink"].Put(uint32(index), uint32(1))
	} else if err = p.maps["tdm_uplink"].Delete(uint32(index)); errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("write uplink %d: %w", index, err)
	}
	return nil
}

// carryFrom begins to carry the flows of an earlier program, if they are not
// ours already.
func (p *packets) carryFrom(program *ciliumebpf.Program) error {
	earlier, err := mapsOf(program)
	if err != nil {
		return err
	}
	defer closeMaps(earlier)
	for _, c := range p.carriers {
		if same, err := sameMap(c.from.flows, earlier["tdm_flow"]); same || err != nil {
			return err
		}
	}
	c, err := newCarrier(earlier, p.maps, &p.opts.Sizes)
	if c != nil && err == nil {
		p.carriers = append(p.carriers, c)
	}
	return err
}

func (p *packets) carry(which func(*carrier) error) error {
	var errs []error
	for _, c := range p.carriers {
		errs = append(errs, which(c))
	}
	return errors.Join(errs...)
}

func (p *packets) endCarrying() {
	for _, c := range p.carriers {
		c.close()
	}
	p.carriers = nil
}

// leave takes the programs off a device, after a while.
func (p *packets) leave(index int) error {
	if _, err := net.InterfaceByIndex(index); err == nil {
		since, leaving := p.leaving[index]
		if !leaving {
			since = time.Now()
			p.leaving[index] = since
		}
		if time.Since(since) < p.linger[p.on[index].role] {
			return nil
		}
		if _, err := detachDevice(index); err != nil {
			return err
		}
	}
	delete(p.leaving, index)
	delete(p.on, index)
	return p.setUplink(index, false)
}

// audit puts back what somebody else took off a device.
func (p *packets) audit(ctx context.Context) error {
	var errs []error
	for index, v := range p.on {
		for _, h := range packetHooks {
			found, err := tc.Find(index, h.direction, isOurProgram)
			if err != nil || len(found) > 0 {
				tc.Close(found)
				if err != nil && !errors.Is(err, tc.ErrNoDevice) {
					errs = append(errs, err)
				}
				continue
			}
			klog.FromContext(ctx).Info("Programs were taken off a device by somebody else; attaching them again", "ifindex", index, "direction", h.direction)
			errs = append(errs, p.attach(index, v))
			break
		}
	}
	return errors.Join(errs...)
}

// attach puts programs on a device, in place of any earlier ones of ours.
// Replies first: a request that gets through without its reply being translated
// would be worse than one that does not.
func (p *packets) attach(device int, v variant) error {
	programs, err := p.programs(v)
	if err != nil {
		return err
	}
	for i, h := range slices.Backward(packetHooks[:]) {
		earlier, err := tc.Find(device, h.direction, isOurProgram)
		if err != nil {
			return err
		}
		// What begins between the two looks is little.
		err = errors.Join(
			p.carry((*carrier).fresh),
			tc.Attach(device, h.direction, p.opts.TC, programs[i], earlier),
			p.carry((*carrier).fresh))
		tc.Close(earlier)
		if err != nil {
			return err
		}
	}
	return nil
}

// detachDevice takes our programs off a device, and returns their names.
func detachDevice(device int) (removed []string, err error) {
	var errs []error
	for _, h := range packetHooks {
		found, err := tc.Find(device, h.direction, isOurProgram)
		if err != nil {
			if !errors.Is(err, tc.ErrNoDevice) {
				errs = append(errs, err)
			}
			continue
		}
		for _, a := range found {
			if err := tc.Detach(a); err != nil && !errors.Is(err, tc.ErrNoDevice) {
				errs = append(errs, err)
				continue
			}
			if info, err := a.Program.Info(); err == nil {
				removed = append(removed, info.Name)
			}
		}
		tc.Close(found)
	}
	return removed, errors.Join(errs...)
}
