// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/xdp"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Acceleration is whether XDP forwards packets on uplinks.
type Acceleration uint8

// The choices.
const (
	// NoAcceleration removes what an earlier process attached.
	NoAcceleration Acceleration = iota
	// BestEffort uses XDP where the driver runs it.
	BestEffort
	// Native reports an error where it does not.
	Native
)

// xdpProgram is its name.
const xdpProgram = "tdm_xdp"

// Accelerated is what came of the acceleration of an uplink: nil if XDP forwards, else why not.
type Accelerated map[int]error

// ErrAcceleration means that XDP cannot forward on a device that has to.
var ErrAcceleration = errors.New("cannot forward by XDP")

// errOff is for devices where nothing was asked for.
var errOff = errors.New("not asked for")

// Accelerated are the uplinks by index, and what came of each.
func (p *Devices) Accelerated() Accelerated { return maps.Clone(p.accelerated) }

// Accelerates reports whether the XDP program is loaded.
func (p *Devices) Accelerates() bool { return p.xdp != nil }

// accelerate attaches the XDP program to uplinks, or detaches what an earlier process attached. The programs of tc serve what it
// passes, so a device on which it cannot run is served all the same.
func (p *Devices) accelerate(ctx context.Context, list []devices.Device) error {
	p.accelerated = Accelerated{}
	var errs []error
	for _, d := range list {
		if _, served := p.Served[d.Index]; !served {
			continue
		}
		err := p.accelerateDevice(ctx, d)
		p.accelerated[d.Index] = err
		if err != nil && p.opts.Acceleration == Native && !errors.Is(err, xdp.ErrNoDevice) {
			errs = append(errs, fmt.Errorf("device %s: %w: %w", d.Name, ErrAcceleration, err))
		}
	}
	return errors.Join(errs...)
}

func (p *Devices) accelerateDevice(ctx context.Context, d devices.Device) error {
	if p.opts.Acceleration == NoAcceleration {
		if _, err := decelerate(d.Index); err != nil {
			return err
		}
		return errOff
	}
	if reason := p.unfit(d); reason != "" {
		_, err := decelerate(d.Index)
		return errors.Join(errors.New(reason), err)
	}
	program, err := p.XDP(ctx)
	if err != nil {
		return err
	}
	id, err := p.idOf(program)
	if err != nil {
		return err
	}
	there, err := xdp.Look(d.Index)
	if err != nil || there.Program == id && there.Native {
		return err
	}
	var earlier *ciliumebpf.Program
	if there.Program != 0 {
		if earlier, err = openOwn(there.Program); err != nil {
			return err
		}
		defer earlier.Close()
	}
	return xdp.Attach(d.Index, program, earlier)
}

// SetTargets tells the XDP programs which uplinks they can redirect packets to. Others would lose them. Drivers change that as
// programs are attached to and detached from a device, or features are turned on and off, by anybody.
func (p *Devices) SetTargets(ctx context.Context) error {
	var targets map[int]bool
	var err error
	if p.opts.Acceleration != NoAcceleration && p.hasSeveral() {
		targets, err = xdp.Targets(ctx)
	}
	errs := []error{err}
	for index, u := range p.uplinks {
		u.XdpTarget = boolByte(targets[index] && u.Redirect == uint8(lbmap.RedirectNextHop))
		errs = append(errs, p.setUplink(index, u))
	}
	return errors.Join(errs...)
}

// hasSeveral reports whether there is more than one uplink, without the members of bonds.
func (p *Devices) hasSeveral() bool {
	n := 0
	for index, u := range p.uplinks {
		if int(u.Device) == index {
			n++
		}
	}
	return n > 1
}

// unfit is why XDP must not forward on a device, whatever its driver says.
func (p *Devices) unfit(d devices.Device) string {
	switch {
	case d.Type == "veth" && p.opts.Acceleration == BestEffort:
		return "the other end of a veth loses what XDP sends, unless it has an XDP program or GRO of its own, which cannot be seen from here"
	case d.L3:
		return "it has no Ethernet header"
	case d.VLANs:
		return "it carries VLANs, whose tags an XDP program does not see where the device takes them off"
	}
	return ""
}

// openOwn opens a program if it is one of this project.
func openOwn(id ciliumebpf.ProgramID) (*ciliumebpf.Program, error) {
	program, err := ciliumebpf.NewProgramFromID(id)
	if err != nil {
		return nil, fmt.Errorf("open XDP program %d: %w", id, err)
	}
	if IsOwnProgram(program) {
		return program, nil
	}
	name := "?"
	if info, err := program.Info(); err == nil {
		name = info.Name
	}
	program.Close()
	return nil, fmt.Errorf("%w: %s (id %d)", xdp.ErrOccupied, name, id)
}

// FindXDP opens the XDP program of this project on a device of the calling thread's network namespace; nil if there is none.
func FindXDP(device int) (*ciliumebpf.Program, error) {
	there, err := xdp.Look(device)
	if err != nil || there.Program == 0 {
		if errors.Is(err, xdp.ErrNoDevice) {
			err = nil
		}
		return nil, err
	}
	program, err := openOwn(there.Program)
	if errors.Is(err, xdp.ErrOccupied) || errors.Is(err, os.ErrNotExist) {
		return nil, nil // a foreign one, or it is gone
	}
	return program, err
}

// decelerate takes the XDP program of this project off a device, and reports whether there was one.
func decelerate(device int) (removed bool, err error) {
	program, err := FindXDP(device)
	if program == nil {
		return false, err
	}
	defer program.Close()
	return true, xdp.Detach(device, program)
}

// XDP loads the XDP program, once.
func (p *Devices) XDP(ctx context.Context) (*ciliumebpf.Program, error) {
	if p.xdp != nil {
		return p.xdp, nil
	}
	program, err := p.loadXDP(ctx, true)
	if err != nil { // before Linux 5.18
		var without error
		if program, without = p.loadXDP(ctx, false); without != nil {
			return nil, errors.Join(err, without)
		}
	}
	p.xdp = program
	return program, nil
}

func (p *Devices) loadXDP(ctx context.Context, frags bool) (*ciliumebpf.Program, error) {
	spec, err := lbmap.XDPSpec()
	if err != nil {
		return nil, err
	}
	constants, err := p.constants(Variant{Role: lbmap.RoleUplink})
	if err != nil {
		return nil, err
	}
	constants["have_frags"] = boolByte(frags)
	if !frags {
		spec.Programs[xdpProgram].Flags = 0
	}
	if err := setConstants(spec, constants, p.Maps); err != nil {
		return nil, err
	}
	collection, err := Load(ctx, "XDP program", spec, ciliumebpf.CollectionOptions{MapReplacements: p.replacements(spec)})
	if err != nil {
		return nil, err
	}
	defer collection.Close()
	program := collection.DetachProgram(xdpProgram)
	if err := program.BindMap(p.Maps["tdm_meta"]); err != nil { // by which it is recognised
		program.Close()
		return nil, fmt.Errorf("bind tdm_meta to %s: %w", xdpProgram, err)
	}
	return program, nil
}
