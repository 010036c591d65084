// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// PacketHook is a direction on a device and its program.
type PacketHook struct {
	Direction tc.Direction
	Program   string
}

var PacketHooks = [...]PacketHook{
	{tc.Ingress, "tdm_in"},
	{tc.Egress, "tdm_out"},
}

// Devices keeps packet programs attached to devices.
type Devices struct {
	Maps   lbmap.Maps // of all programs, by name; not its own
	opts   DeviceOptions
	flows  FlowMigration
	Loaded map[Variant]*PacketPrograms
	// twins are second loads of the same programs. Where others overtook a program, its twin
	// takes its place.
	twins map[Variant]*PacketPrograms
	ids   map[*ciliumebpf.Program]ciliumebpf.ProgramID
	// moves are the times at which programs moved past foreign ones.
	moves map[place][]time.Time
	// Served are the devices that have programs, by index.
	Served map[int]Variant
	// InheritedPods are devices of pods that an earlier process served, for a reason that this one
	// may not know.
	InheritedPods []int
	// leaving are those of them that are no longer wanted, and since when. Their
	// connections are served for a while.
	leaving map[int]time.Time
	linger  [2]time.Duration // by role
	looked  bool             // whether takeOver has succeeded

	uplinks map[int]lbmap.Uplink // what the programs know
	// superseded are earlier programs that stay attached until the flows in their maps are copied.
	superseded []tc.Attachment
	// other is what setOther wrote; nil before, as an earlier process may have written something.
	other *uint64

	xdp         *ciliumebpf.Program // nil until it is needed
	accelerated Accelerated

	NoConntrack bool
}

// DeviceOptions are the options of programs on devices.
type DeviceOptions struct {
	Sizes lbmap.Sizes
	// TC is how programs are attached to devices.
	TC tc.Method
	// SNAT are the source ports of connections to remote backends.
	SNAT SNATPool
	// NoFIBSource, NoLoop and NoConntrack are for kernels without these.
	NoFIBSource, NoLoop, NoConntrack bool
	// Dispatch is in what form packets of direct server return are sent.
	Dispatch lbmap.Dispatch
	// DirectSources are prefixes, one of a family, of the source addresses of IP in IP.
	DirectSources []netip.Prefix
	// ResetRemoved answers clients of removed TCP backends by a reset.
	ResetRemoved bool
	// Acceleration is whether XDP forwards on uplinks.
	Acceleration Acceleration
	// Draining is for programs that accept no new connections. They stay on devices that are
	// no longer wanted for as long as FlowsLeft, if set, says that there are connections.
	Draining  bool
	FlowsLeft func() int
	// Flows copies the flows of earlier programs into these maps; nil for programs that
	// replace no others.
	Flows FlowMigration
}

// FlowMigration copies flows out of the maps of programs that are about to be replaced,
// where those are not the maps of the new ones.
type FlowMigration interface {
	// Add opens the flows in the maps of an earlier program.
	Add(earlier lbmap.Maps) error
	// Active reports whether there are flows to copy.
	Active() bool
	CopyAll() error
	// CopyNew copies the flows that began since.
	CopyNew() error
	// Finish is called when no program uses the earlier maps any more.
	Finish(ctx context.Context) error
	Close()
}

// noFlows is for programs that replace no others.
type noFlows struct{}

func (noFlows) Add(lbmap.Maps) error         { return nil }
func (noFlows) Active() bool                 { return false }
func (noFlows) CopyAll() error               { return nil }
func (noFlows) CopyNew() error               { return nil }
func (noFlows) Finish(context.Context) error { return nil }
func (noFlows) Close()                       {}

// defaultLinger is how long devices are served that are no longer wanted. A route that comes
// and goes must not break connections, and those of a pod that ends its opt-out are still
// translated on its device.
var defaultLinger = [2]time.Duration{lbmap.RoleUplink: time.Minute, lbmap.RolePod: time.Hour}

// NewDevices manages programs on devices that use these maps, which stay the caller's.
func NewDevices(maps lbmap.Maps, opts DeviceOptions) *Devices {
	p := &Devices{Maps: maps, opts: opts, flows: opts.Flows, Loaded: map[Variant]*PacketPrograms{}, Served: map[int]Variant{},
		twins: map[Variant]*PacketPrograms{}, ids: map[*ciliumebpf.Program]ciliumebpf.ProgramID{}, moves: map[place][]time.Time{},
		leaving: map[int]time.Time{}, linger: defaultLinger, uplinks: map[int]lbmap.Uplink{}, NoConntrack: opts.NoConntrack}
	if p.flows == nil {
		p.flows = noFlows{}
	}
	return p
}

// Close releases the programs; those that are attached stay so.
func (p *Devices) Close() {
	for _, loaded := range []map[Variant]*PacketPrograms{p.Loaded, p.twins} {
		for _, programs := range loaded {
			programs.close()
		}
	}
	p.Loaded, p.twins = nil, nil
	p.xdp.Close()
	p.flows.Close()
	tc.Close(p.superseded)
}

// Serve attaches programs to these devices, uplinks and those of pods by index, and detaches
// them from others. A device that fails does not keep the others waiting.
func (p *Devices) Serve(ctx context.Context, list []devices.Device, pods map[int]Variant) error {
	var errs []error
	want := maps.Clone(pods)
	if want == nil {
		want = map[int]Variant{}
	}
	for _, d := range list {
		want[d.Index] = Variant{Role: lbmap.RoleUplink, L3: d.L3}
	}
	if !p.looked {
		err := p.takeOver(ctx, want)
		p.looked = err == nil
		errs = append(errs, err, p.readUplinks())
		defer p.flows.Close()
	}
	uplinks := uplinksOf(list)
	for index, u := range uplinks {
		u.XdpTarget = p.uplinks[index].XdpTarget // until that is known anew
		errs = append(errs, p.setUplink(index, u))
	}
	for index := range want {
		delete(p.leaving, index)
	}
	for index, v := range want {
		if there, ok := p.Served[index]; ok && there == v {
			continue
		}
		errs = append(errs, p.startServing(ctx, index, v))
	}
	errs = append(errs, p.accelerate(ctx, list), p.SetTargets(ctx))
	for index := range p.Served {
		if _, wanted := want[index]; !wanted {
			errs = append(errs, p.stopServing(index))
		}
	}
	// Some were never served: members of bonds, and devices that vanished before programs were attached.
	for index := range p.uplinks {
		_, wanted := uplinks[index]
		if _, served := p.Served[index]; !served && !wanted {
			errs = append(errs, p.removeUplink(index))
		}
	}
	errs = append(errs, p.setOther(lbmap.OtherNone), p.flows.Finish(ctx), p.detachSuperseded())
	return errors.Join(errs...)
}

// setOther tells programs which others are with them on their devices.
func (p *Devices) setOther(other uint64) error {
	if p.other != nil && *p.other == other {
		return nil
	}
	err := lbmap.SetOther(p.Maps["tdm_flow_count"], other)
	if err == nil {
		p.other = &other
	}
	return err
}

// attachAhead attaches a program ahead of earlier ones, which stay until the flows in their maps are copied. It reports whether
// it did; otherwise all is as before.
func (p *Devices) attachAhead(ctx context.Context, device int, d tc.Direction, program *ciliumebpf.Program, earlier []tc.Attachment) bool {
	if p.opts.TC != tc.TCX || !p.flows.Active() || len(earlier) == 0 {
		return false
	}
	err := p.setOther(lbmap.OtherBehind)
	for _, e := range earlier {
		if err == nil {
			err = p.tell(e.Program, lbmap.OtherAhead)
		}
	}
	if err == nil {
		err = tc.Attach(device, d, p.opts.TC, program, nil)
	}
	if err == nil {
		p.superseded = append(p.superseded, earlier...)
		return true
	}
	for _, e := range earlier {
		_ = p.tell(e.Program, lbmap.OtherNone) // one that cannot be told was not told before
	}
	if !errors.Is(err, errSameFlows) {
		klog.FromContext(ctx).Info("Earlier programs cannot stay behind the new one while flows are copied; it replaces them", "device", device, "direction", d, "err", err)
	}
	return false
}

var (
	errSameFlows = errors.New("the program has the same flows")
	errUnaware   = errors.New("the program is of a version that does not know of others")
)

// tell tells a program which others are with it. Those that have the same flows, or are of a version that does not know of that, cannot be
// behind another one.
func (p *Devices) tell(program *ciliumebpf.Program, other uint64) error {
	maps, err := lbmap.MapsOf(program)
	if err != nil {
		return err
	}
	defer maps.Close()
	counts := maps["tdm_flow_count"]
	if counts == nil {
		return errUnaware
	}
	switch same, err := lbmap.SameMap(counts, p.Maps["tdm_flow_count"]); {
	case err != nil:
		return err
	case same:
		return errSameFlows
	}
	return lbmap.SetOther(counts, other)
}

// detachSuperseded takes off earlier programs that are not needed any more.
func (p *Devices) detachSuperseded() error {
	var errs []error
	for _, a := range p.superseded {
		errs = append(errs, tc.Detach(a))
	}
	tc.Close(p.superseded)
	p.superseded = nil
	return errors.Join(errs...)
}

// startServing attaches programs to a device.
func (p *Devices) startServing(ctx context.Context, index int, v Variant) error {
	// Before the programs look it up.
	err := p.setRole(index, v)
	switch attachErr := p.Attach(ctx, index, v); {
	case attachErr == nil:
		p.Served[index] = v
	case !errors.Is(attachErr, tc.ErrNoDevice):
		err = errors.Join(err, fmt.Errorf("device %d: %w", index, attachErr))
	}
	return err
}

// stopServing detaches the programs of a device after a while.
func (p *Devices) stopServing(index int) error {
	if p.opts.Draining && p.opts.FlowsLeft != nil && p.opts.FlowsLeft() > 0 {
		return nil
	}
	if _, err := net.InterfaceByIndex(index); err == nil && !p.opts.Draining {
		since, leaving := p.leaving[index]
		if !leaving {
			since = time.Now()
			p.leaving[index] = since
		}
		if time.Since(since) < p.linger[p.Served[index].Role] {
			return nil
		}
	}
	if _, err := DetachDevice(index); err != nil {
		return err
	}
	delete(p.leaving, index)
	delete(p.Served, index)
	return nil
}

// Attach attaches programs to a device, in place of earlier ones. Egress comes first: a request that is translated and whose reply is
// not would be worse than one that is not translated. While flows are copied, the earlier program stays behind the
// new one, for packets of flows that began since the last copy.
func (p *Devices) Attach(ctx context.Context, device int, v Variant) error {
	programs, err := p.Programs(ctx, v)
	if err != nil {
		return err
	}
	for i, h := range slices.Backward(PacketHooks[:]) {
		earlier, err := tc.Find(device, h.Direction, IsOwnProgram)
		if err != nil {
			return err
		}
		// Few flows begin between the two copies.
		err = p.flows.CopyNew()
		if !p.attachAhead(ctx, device, h.Direction, programs[i], earlier) {
			err = errors.Join(err, tc.Attach(device, h.Direction, p.opts.TC, programs[i], earlier))
			tc.Close(earlier)
		}
		if err = errors.Join(err, p.flows.CopyNew()); err != nil {
			return err
		}
	}
	return nil
}

// addFlows adds the flows of an earlier program to those to be copied.
func (p *Devices) addFlows(program *ciliumebpf.Program) error {
	earlier, err := lbmap.MapsOf(program)
	if err != nil {
		return err
	}
	defer earlier.Close()
	return p.flows.Add(earlier)
}
