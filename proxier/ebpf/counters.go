// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"sync/atomic"
	"time"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/direct"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// ServiceTraffic is the traffic of a service port.
type ServiceTraffic struct {
	Namespace, Name, Port, Protocol string
	// Node and Outside are of clients on this node and outside.
	Node, Outside proxier.Outcomes
	// Refused and Unanswered are TCP connections that packet programs translated and that were never established:
	// of clients outside and of pods that opted out.
	Refused, Unanswered uint64
	flowtable.Traffic
	// Signals of connections of sockets of this node; none if they are not watched.
	Signals lbmap.ServiceSignals
}

// Traffic of all service ports that clients tried to connect to.
func (t *Tier) Traffic() (list []ServiceTraffic, err error) {
	t.gen.RLock()
	defer t.gen.RUnlock()
	err = t.writer.Read(func(tables *lbmap.Tables) error {
		live, err := flowtable.TrafficByService(tables, t.maps, t.flowTable.Used())
		if err != nil {
			return err
		}
		for id := range tables.Services {
			service := &tables.Services[id]
			stats := &tables.ServiceStats[id]
			s := ServiceTraffic{
				Protocol: proxier.Protocol(service.Proto).String(), Traffic: live[uint32(id)],
				Refused: atomic.LoadUint64(&stats.Refused), Unanswered: atomic.LoadUint64(&stats.Unanswered),
			}
			s.Node, s.Outside = stats.Outcomes()
			if s.Node.Plus(s.Outside) == (proxier.Outcomes{}) || service.State == lbmap.ServiceFree {
				continue
			}
			s.Namespace, s.Name, s.Port = service.SplitName()
			if s.Signals, err = t.signalsOf(uint32(id)); err != nil {
				return err
			}
			list = append(list, s)
		}
		return nil
	})
	return list, err
}

// signalsOf are the signals of a service port, by id; 0 for those that have none of their own, together.
func (t *Tier) signalsOf(service uint32) (lbmap.ServiceSignals, error) {
	if !t.opts.Signals {
		return lbmap.ServiceSignals{}, nil
	}
	return t.signals.Of(service)
}

// SharedSignals are those of service ports that have none of their own.
func (t *Tier) SharedSignals() (lbmap.ServiceSignals, error) {
	t.gen.RLock()
	defer t.gen.RUnlock()
	return t.signalsOf(0)
}

// DirectPeers counts the endpoints on other nodes that direct server return is wanted for, and those whose nodes take it.
func (t *Tier) DirectPeers() direct.Counts {
	if t.direct == nil {
		return direct.Counts{}
	}
	return t.direct.Counts()
}

// Packets counts the packets of Services since the programs were attached, by verdict.
func (t *Tier) Packets() ([]lbmap.PacketCount, error) {
	t.gen.RLock()
	defer t.gen.RUnlock()
	return lbmap.ReadPacketCounts(t.maps["tdm_reason"])
}

// Capacities of the tables, by name, now and when they have grown.
func (t *Tier) Capacities() map[string]lbmap.Capacity {
	most := t.growth.limits.Most
	limits := map[string]int{
		"services": int(most.Services) - 1, "backends": int(most.Backends) - 1, "tcp_flows": int(most.TCPFlows), "udp_flows": int(most.UDPFlows),
		"flows": flowtable.Limit(most), "udp_peers": int(most.UDPPeers), "frontends": int(most.Frontends), "slots": int(most.Slots), "affinity": int(most.Affinity),
	}
	all := map[string]lbmap.Capacity{}
	for name, u := range t.Usage() {
		all[name] = lbmap.Capacity{Usage: u, Limit: max(u.Max, limits[name])}
	}
	return all
}

// Usage of the tables, by name. What programs write is counted entry by entry.
func (t *Tier) Usage() map[string]lbmap.Usage {
	t.gen.RLock()
	defer t.gen.RUnlock()
	all := t.writer.Usage()
	f := t.flowTable
	all["flows"] = lbmap.Usage{Used: f.Used(), Max: f.Limit()}
	all["tcp_flows"] = lbmap.Usage{Used: int(f.Count(lbmap.FlowKeptTCP)), Max: int(t.sizes.TCPFlows)}
	all["udp_flows"] = lbmap.Usage{Used: int(f.Count(lbmap.FlowKeptUDP)), Max: int(t.sizes.UDPFlows)}
	for _, m := range []struct {
		name, table string
		count       func(*ciliumebpf.Map) (int, error)
	}{
		{"affinity", "tdm_affinity", t.countAffinities},
		{"udp_peers", "tdm_udp_peer", lbmap.CountEntries[lbmap.UDPPeerKey, lbmap.UDPPeer]},
		{"opt_outs", "tdm_optout", lbmap.CountEntries[uint64, uint8]},
	} {
		table := t.maps[m.table]
		if table == nil {
			continue
		}
		if used, err := m.count(table); err == nil { // without a count, the map is left out
			all[m.name] = lbmap.Usage{Used: used, Max: int(table.MaxEntries())}
		}
	}
	return all
}

// countAffinities counts the clients whose affinity has not timed out. Entries stay longer, until the LRU map needs
// their place, and so do not tell whether it has to evict clients that count on them.
func (t *Tier) countAffinities(m *ciliumebpf.Map) (live int, err error) {
	timeouts := t.writer.AffinityTimeouts()
	if len(timeouts) == 0 {
		return 0, nil
	}
	now := flowtable.MonotonicSeconds()
	err = lbmap.Each(m, func(key lbmap.AffinityKey, a lbmap.Affinity) {
		if timeout, ok := timeouts[key.Service]; ok && int64(now)-int64(a.LastNs/uint64(time.Second)) <= int64(timeout) {
			live++
		}
	})
	return live, err
}

// Unplaced are the service ports that do not fit into the maps, by Decision.Index, and
// why.
func (t *Tier) Unplaced() map[uint32]error { return t.writer.Unplaced() }

// IsUnplaced reports whether a service port does not fit into the maps.
func (t *Tier) IsUnplaced(index uint32) bool { return t.writer.IsUnplaced(index) }

// ClosedSockets counts the UDP sockets that were closed because their backend
// was gone.
func (t *Tier) ClosedSockets() uint64 { return t.sockets.Closed() }
