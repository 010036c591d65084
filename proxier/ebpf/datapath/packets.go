// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"strings"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/loading"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Role is which side of a device its clients are on: enum role of
// bpf/tc_config.h.
type Role uint8

// Variant is what differs between devices; programs are loaded once for each.
type Variant struct {
	Role Role
	L3   bool // no Ethernet header
	// FromPod says that all that comes in is from a pod, whatever its address.
	FromPod bool
}

// PacketPrograms are loaded programs in the order of PacketHooks.
type PacketPrograms [len(PacketHooks)]*ciliumebpf.Program

func (p *PacketPrograms) close() {
	for _, program := range p {
		program.Close()
	}
}

// Programs loads the programs of a variant, once.
func (p *Devices) Programs(ctx context.Context, v Variant) (*PacketPrograms, error) {
	if programs := p.Loaded[v]; programs != nil {
		return programs, nil
	}
	var noModule error
	if !p.NoConntrack {
		noModule = loadConntrack()
	}
	programs, err := p.load(ctx, v)
	if err != nil && !p.NoConntrack {
		// The kernel supports it, but its module may be missing.
		p.NoConntrack = true
		var without error
		if programs, without = p.load(ctx, v); without == nil {
			klog.FromContext(ctx).Info("Cannot look up conntrack; packets of connections that netfilter translates are treated as new connections", "reason", errors.Join(err, noModule).Error())
			err = nil
		} else {
			p.NoConntrack = false // the cause was another one, which may be temporary
		}
	}
	if err != nil {
		return nil, err
	}
	p.Loaded[v] = programs
	return programs, nil
}

// haveKernelTypes reports whether the kernel has BTF.
func haveKernelTypes() bool {
	_, err := loading.KernelTypes().Kernel()
	return err == nil
}

func (p *Devices) load(ctx context.Context, v Variant) (*PacketPrograms, error) {
	spec, err := lbmap.PacketSpec()
	if err != nil {
		return nil, err
	}
	constants, err := p.constants(v)
	if err != nil {
		return nil, err
	}
	if err := setConstants(spec, constants, p.Maps); err != nil {
		return nil, err
	}
	opts := ciliumebpf.CollectionOptions{MapReplacements: p.replacements(spec)}
	if p.NoConntrack && !haveKernelTypes() {
		opts.Programs.KernelTypes = spec.Types // which nothing refers to that is used then
	}
	collection, err := Load(ctx, "packet programs", spec, opts)
	if err != nil {
		return nil, err
	}
	defer collection.Close()
	programs := &PacketPrograms{}
	for i, h := range PacketHooks {
		programs[i] = collection.DetachProgram(h.Program)
		// Programs are recognised by this map, which not all of them use.
		if err := programs[i].BindMap(p.Maps["tdm_meta"]); err != nil {
			programs.close()
			return nil, fmt.Errorf("bind tdm_meta to %s: %w", h.Program, err)
		}
	}
	return programs, nil
}

// constants are the load-time constants of a variant.
func (p *Devices) constants(v Variant) (map[string]any, error) {
	var meta lbmap.Meta
	if err := p.Maps["tdm_meta"].Lookup(uint32(0), &meta); err != nil {
		return nil, fmt.Errorf("read the generation of the tables: %w", err)
	}
	return map[string]any{
		"role": uint8(v.Role), "l2_len": l2Len(v.L3), "from_pod": boolByte(v.FromPod),
		"max_flows": p.Maps["tdm_flow"].MaxEntries(), "max_young": p.Maps["tdm_flow_young"].MaxEntries() - lbmap.MaxClosed,
		"flow_lists":   p.Maps["tdm_flow_free"].MaxEntries(),
		"max_kept_tcp": uint64(p.opts.Sizes.TCPFlows), "max_kept_udp": uint64(p.opts.Sizes.UDPFlows),
		"snat_ranges": p.opts.SNAT.bpf(), "snat_ports": uint32(p.opts.SNAT.usual), "snat_all_ports": uint32(p.opts.SNAT.all),
		"have_fib_source": boolByte(!p.opts.NoFIBSource), "have_loop": boolByte(!p.opts.NoLoop), "reset_removed": boolByte(p.opts.ResetRemoved),
		"first_generation": meta.Generation,
		"have_conntrack":   boolByte(!p.NoConntrack), "draining": boolByte(p.opts.Draining), "dispatch": uint8(p.opts.Dispatch), "spreads": lbmap.SpreadsOf(p.opts.DirectSources),
	}, nil
}

// replacements are the maps that programs share with others.
func (p *Devices) replacements(spec *ciliumebpf.CollectionSpec) lbmap.Maps {
	replacements := lbmap.Maps{}
	for name := range spec.Maps {
		if m := p.Maps[name]; m != nil {
			replacements[name] = m
			spec.Maps[name].MaxEntries = m.MaxEntries()
		} else if lbmap.HasOwnName(name) && !strings.HasPrefix(name, "tdm_xdp") {
			delete(spec.Maps, name) // the load fails if a program uses it
		}
	}
	return replacements
}

// setConstants sets load-time constants of programs, and those by which they find flows.
func setConstants(spec *ciliumebpf.CollectionSpec, constants map[string]any, maps lbmap.Maps) error {
	var seed lbmap.FlowCounter
	if err := maps["tdm_flow_count"].Lookup(uint32(lbmap.FlowSeed), &seed); err != nil {
		return fmt.Errorf("read the seed of the flows' keys: %w", err)
	}
	constants["max_homes"], constants["flow_seed"] = maps["tdm_flow_entry"].MaxEntries()-(lbmap.FlowNear-1), seed.Value
	for name, value := range constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}
