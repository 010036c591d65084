// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sizing"
)

// shrinkBy is how many times more memory maps take than would do when the next process replaces them by smaller ones.
const shrinkBy = 4

// firstSizes are those to begin with: of the maps that an earlier process left, as far as these can be kept, or those of new maps.
func (t *Tier) firstSizes(logger klog.Logger) (lbmap.Sizes, error) {
	limits := &t.growth.limits
	if len(t.earlier) == 0 || !t.growth.grows() {
		return limits.Start, nil
	}
	maps := lbmap.Maps{}
	for _, e := range t.earlier {
		if err := maps.Add(e.Program); err != nil {
			maps.Close()
			return limits.Start, err
		}
	}
	defer maps.Close()
	holds, err := heldBy(maps)
	if err != nil {
		logger.V(2).Info("Cannot tell what the maps of an earlier process hold", "reason", err.Error())
	}
	level := limits.LevelFor(int(holds.TCPFlows))
	for l := range sizing.Levels(limits.Most) {
		sizes := flowtable.MapSizes(sizing.Flows(limits.Most, limits.Most, l))
		if m := maps["tdm_flow"]; m != nil && sizes["tdm_flow"] == m.MaxEntries() {
			level = l
		}
	}
	there := limits.Adopt(lbmap.SizesOf(maps), level)
	if err != nil {
		return there, nil
	}
	enough := limits.Next(limits.Start, holds, sizing.Memory)
	if sizing.Memory(there) < shrinkBy*sizing.Memory(enough) {
		return there, nil
	}
	// Larger maps with new ids know no clients.
	if n, err := lbmap.CountEntries[lbmap.AffinityKey, lbmap.Affinity](maps["tdm_affinity"]); n > 0 || err != nil {
		return there, nil
	}
	logger.Info("The eBPF maps are much larger than they need to be; making smaller ones", "sizes", sizing.Changes(there, enough))
	return enough, nil
}

// heldBy is how much is in the maps of an earlier process.
func heldBy(maps lbmap.Maps) (s lbmap.Sizes, err error) {
	var meta lbmap.Meta
	m, counts := maps["tdm_meta"], maps["tdm_flow_count"]
	if m == nil || counts == nil || maps["tdm_affinity"] == nil || maps["tdm_flow"] == nil || maps["tdm_flow_free"] == nil {
		return s, errors.New("maps are missing")
	}
	var tcp, udp lbmap.FlowCounter
	if err := errors.Join(m.Lookup(uint32(0), &meta), counts.Lookup(uint32(lbmap.FlowKeptTCP), &tcp), counts.Lookup(uint32(lbmap.FlowKeptUDP), &udp)); err != nil {
		return s, fmt.Errorf("read the gauges of an earlier process: %w", err)
	}
	flows, err := flowtable.UsedIn(maps)
	if err != nil {
		return s, err
	}
	return lbmap.Sizes{
		Frontends: meta.FrontendsUsed, Services: meta.ServicesUsed + 1, Backends: meta.BackendsUsed + 1, Slots: meta.SlotsUsed,
		TCPFlows: uint32(tcp.Value), UDPFlows: uint32(udp.Value),
		// How many begin in a second is not known.
		YoungFlows: uint32(max(0, flows-int(tcp.Value+udp.Value))),
	}, nil
}

// describeLimits writes what maps may become where others can read it.
func (t *Tier) describeLimits() {
	most := t.growth.limits.Most
	_ = t.writer.Read(func(tables *lbmap.Tables) error { // fails never
		m := tables.Meta
		m.BytesLimit, m.FrontendsLimit, m.ServicesLimit, m.BackendsLimit = t.growth.limits.Memory, most.Frontends, most.Services, most.Backends
		m.SlotsLimit, m.AffinityLimit, m.UdpPeersLimit, m.FlowsLimit = most.Slots, most.Affinity, most.UDPPeers, flowtable.MapSizes(most)["tdm_flow"]
		return nil
	})
}
