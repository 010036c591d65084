// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Hold drops TCP packets of known flows that no program on a device has translated, before the
// stack answers them by a reset. See bpf/hold.bpf.c. It ends with the process.
type Hold struct{ links []link.Link }

// holdPriorities are before all rules: those of iptables begin at -300, and conntrack is at -200.
// The kernel does not allow the lowest number, and only one program at a number. So there are two, for the time in which programs
// replace others.
var holdPriorities = [...]int32{math.MinInt32 + 1, math.MinInt32 + 2}

// LoadHold loads the programs, without attaching them. It needs Linux 6.4.
func LoadHold(ctx context.Context, maps lbmap.Maps) (*ciliumebpf.Collection, error) {
	spec, err := lbmap.HoldSpec()
	if err != nil {
		return nil, err
	}
	if err := setConstants(spec, map[string]any{}, maps); err != nil {
		return nil, err
	}
	replacements := lbmap.Maps{}
	for name := range spec.Maps {
		if m := maps[name]; m != nil {
			replacements[name] = m
			spec.Maps[name].MaxEntries = m.MaxEntries()
		}
	}
	return Load(ctx, "netfilter programs", spec, ciliumebpf.CollectionOptions{MapReplacements: replacements})
}

// AttachHold loads the programs and attaches them in the network namespace of the calling thread.
func AttachHold(ctx context.Context, maps lbmap.Maps) (*Hold, error) {
	collection, err := LoadHold(ctx, maps)
	if err != nil {
		return nil, err
	}
	defer collection.Close()
	for name, p := range collection.Programs {
		if err := p.BindMap(maps["tdm_meta"]); err != nil { // for FindHold
			return nil, fmt.Errorf("bind tdm_meta to %s: %w", name, err)
		}
	}
	h := &Hold{}
	for _, at := range []struct {
		program string
		family  link.NetfilterProtocolFamily
		hook    link.NetfilterInetHook
	}{
		{"tdm_hold_in4", link.NetfilterProtoIPv4, link.NetfilterInetLocalIn},
		{"tdm_hold_in6", link.NetfilterProtoIPv6, link.NetfilterInetLocalIn},
		{"tdm_hold_pod4", link.NetfilterProtoIPv4, link.NetfilterInetForward},
		{"tdm_hold_pod6", link.NetfilterProtoIPv6, link.NetfilterInetForward},
	} {
		var l link.Link
		for _, priority := range holdPriorities {
			l, err = link.AttachNetfilter(link.NetfilterOptions{Program: collection.Programs[at.program], ProtocolFamily: at.family, Hook: at.hook, Priority: priority})
			if !errors.Is(err, unix.EBUSY) {
				break
			}
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("attach %s: %w", at.program, err), h.Close())
		}
		h.links = append(h.links, l)
	}
	return h, nil
}

// FindHold opens the programs that a process attached which has this map tdm_meta. Links do not tell the network
// namespace that they are in, so the map has to.
func FindHold(meta *ciliumebpf.Map) (found []*ciliumebpf.Program, err error) {
	of, err := meta.Info()
	if err != nil {
		return nil, fmt.Errorf("inspect map tdm_meta: %w", err)
	}
	id, _ := of.ID()
	var links link.Iterator
	defer links.Close()
	for links.Next() {
		info, err := links.Link.Info()
		if err != nil || info.Netfilter() == nil {
			continue // a link of others
		}
		program, err := ciliumebpf.NewProgramFromID(info.Program)
		if err != nil {
			continue // detached this moment
		}
		if about, err := program.Info(); err == nil && strings.HasPrefix(about.Name, "tdm_hold_") {
			if ids, _ := about.MapIDs(); slices.Contains(ids, id) {
				found = append(found, program)
				continue
			}
		}
		program.Close()
	}
	if err := links.Err(); err != nil {
		CloseHold(found)
		return nil, fmt.Errorf("list links: %w", err)
	}
	return found, nil
}

// CloseHold closes what FindHold opened.
func CloseHold(list []*ciliumebpf.Program) {
	for _, p := range list {
		p.Close()
	}
}

// Close detaches the programs.
func (h *Hold) Close() error {
	var errs []error
	for _, l := range h.links {
		errs = append(errs, l.Close())
	}
	h.links = nil
	return errors.Join(errs...)
}
