// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// adopt loads the programs onto the maps of the earlier ones.
func (t *Tier) adopt(ctx context.Context, s specs) error {
	programs := make([]*ciliumebpf.Program, len(t.earlier))
	for i, e := range t.earlier {
		programs[i] = e.Program
	}
	maps, err := lbmap.MapsOf(programs...)
	if err != nil {
		return err
	}
	defer maps.Close()
	replacements := lbmap.Maps{}
	for name, spec := range s.sockets.Maps {
		if !lbmap.HasOwnName(name) {
			continue
		}
		m := maps[name]
		if m == nil && spec.Type == ciliumebpf.RingBuf { // there is nothing in it to keep
			continue
		}
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
			replacements[name] = m // openPacketMaps looks at them
		}
	}
	if err := t.load(ctx, s, replacements); err != nil {
		return err
	}
	if err := t.writer.Load(); err != nil {
		t.unload()
		return err
	}
	t.describeLimits()
	return nil
}

// kept is what new tables take over from earlier programs.
type kept struct {
	maps    lbmap.Maps // with the state of sockets and clients
	optOuts map[uint64]lbmap.OptOutBy
	// generation is where those of the new tables' backends begin: none of the earlier tables' backends has it, by which
	// sockets, clients and flows know them.
	generation uint32
}

// keep returns what to take over from earlier programs if their tables cannot be adopted.
func (t *Tier) keep(logger klog.Logger, s specs) kept {
	// The time, unless one id is used again more often than once a second, or the clock was set back.
	k := kept{maps: lbmap.Maps{}, generation: uint32(time.Now().Unix()) | 1}
	for _, e := range t.earlier {
		maps, err := lbmap.MapsOf(e.Program)
		if err != nil {
			logger.Error(err, "Cannot open the maps of an earlier program")
			continue
		}
		if k.generation, err = lbmap.GenerationAfter(maps["tdm_backend"], k.generation); err != nil {
			logger.V(2).Info("Cannot read the backends of an earlier program; going by the time", "reason", err)
		}
		for _, name := range append([]string{"tdm_sock", "tdm_udp_peer", "tdm_optout"}, flowtable.MapNames...) {
			m := maps[name]
			if m == nil || k.maps[name] != nil {
				continue
			}
			// Of the maps of flows, openPacketMaps knows what fits.
			if spec := s.sockets.Maps[name]; spec == nil || spec.Compatible(m) == nil {
				k.maps[name] = m
				delete(maps, name)
			} else if name == "tdm_optout" {
				k.optOuts, _ = lbmap.OptOuts(m) // none if they cannot be read
			}
		}
		maps.Close()
	}
	return k
}
