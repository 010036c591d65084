// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"
)

// role is which side of a device its clients are on: enum role of
// bpf/tc_config.h.
type role uint8

// variant is what programs are loaded for: all else is alike on all devices.
type variant struct {
	role role
	l3   bool // no Ethernet header
	// pod says that what comes in is of a pod, whatever its address.
	pod bool
}

// packetPrograms are loaded programs in the order of packetHooks.
type packetPrograms [len(packetHooks)]*ciliumebpf.Program

func (p *packetPrograms) close() {
	for _, program := range p {
		program.Close()
	}
}

// programs loads what a variant needs.
func (p *packets) programs(ctx context.Context, v variant) (*packetPrograms, error) {
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
			klog.FromContext(ctx).Info("Packet programs run without netfilter's conntrack: they take packets of its translated connections for new connections", "reason", errors.Join(err, noModule).Error())
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
		"max_flows": p.maps["tdm_flow"].MaxEntries(), "max_young": p.maps["tdm_flow_young"].MaxEntries() - MaxClosed,
		"max_kept_tcp": uint64(p.opts.Sizes.TCPFlows), "max_kept_udp": uint64(p.opts.Sizes.UDPFlows),
		"snat_ranges": p.opts.SNAT.bpf(), "snat_ports": uint32(p.opts.SNAT.usual), "snat_all_ports": uint32(p.opts.SNAT.all),
		"have_fib_source": boolByte(!p.opts.NoFIBSource), "have_loop": boolByte(!p.opts.NoLoop), "reset_removed": boolByte(p.opts.ResetRemoved),
		"first_generation": meta.Generation,
		"have_conntrack":   boolByte(!p.noConntrack), "draining": boolByte(p.opts.Draining),
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	replacements := Maps{}
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
