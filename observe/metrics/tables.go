// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"sync"
	"time"

	k8smetrics "k8s.io/component-base/metrics"

	"github.com/tandem-proxy/tandem/proxier"
)

// Table is the usage of an eBPF map.
type Table struct {
	// Used entries of Size, which may become Max.
	Used, Size, Max int
}

// Tables are the counters and map sizes of a datapath.
type Tables struct {
	ByName map[string]Table
	// MapBytes is the memory of all maps, and MapGrowths how often they grew.
	MapBytes, MapGrowths uint64
	// Unplaced is the number of service ports over capacity; negative if unknown.
	Unplaced int
	// ClosedSockets counts sockets closed since the start; negative if unknown.
	ClosedSockets int64
	// LastYield is when programs left new connections to another kube-proxy; zero if they did not.
	LastYield time.Time
	// Direct are the endpoints on other nodes that direct server return is wanted for, and DirectReady those whose nodes take it.
	Direct, DirectReady int
	// Accelerated says of uplinks whether XDP forwards there; empty where it is not to.
	Accelerated map[string]bool
	// Packets are the packet verdict counters.
	Packets map[string]uint64
	// Services are the service ports that had connections.
	Services []Service
	// Shared are the signals of service ports that have none of their own; nil if connections are not watched.
	Shared *Signals
}

// Service has the traffic counters of a service port.
type Service struct {
	Namespace, Name, Port, Protocol string
	// Node and Outside are of clients on this node and outside.
	Node, Outside  proxier.Outcomes
	Packets, Bytes uint64
	// Refused and Unanswered are TCP connections that packet programs translated and that were never established:
	// of clients outside and of pods that opted out.
	Refused, Unanswered uint64
	// Signals are nil if connections are not watched.
	Signals *Signals
}

// maxServices bounds how many service ports have series of their own. The first ones get
// them, and all others share one series without a name.
const maxServices = 256

// TableSource is called for each scrape. It returns false while there is no datapath.
type TableSource func() (Tables, bool)

var (
	entriesDesc  = k8smetrics.NewDesc("tandem_map_entries", "Entries in use in each map of the eBPF datapath.", []string{"map"}, nil, k8smetrics.ALPHA, "")
	capacityDesc = k8smetrics.NewDesc("tandem_map_capacity", "Entries that each map of the eBPF datapath can have room for at most.", []string{"map"}, nil, k8smetrics.ALPHA, "")
	sizeDesc     = k8smetrics.NewDesc("tandem_map_size", "Entries that each map of the eBPF datapath has room for now. It grows up to tandem_map_capacity.", []string{"map"}, nil, k8smetrics.ALPHA, "")
	bytesDesc    = k8smetrics.NewDesc("tandem_map_memory_bytes", "Memory of all maps of the eBPF datapath, as estimated from their sizes.", nil, nil, k8smetrics.ALPHA, "")
	growthsDesc  = k8smetrics.NewDesc("tandem_map_growths_total", "Steps in which maps of the eBPF datapath were replaced by larger ones.", nil, nil, k8smetrics.ALPHA, "")
	unplacedDesc = k8smetrics.NewDesc("tandem_unplaced_service_ports", "Service ports over the capacity of the maps, which are not served.", nil, nil, k8smetrics.ALPHA, "")
	directDesc   = k8smetrics.NewDesc("tandem_direct_server_return_endpoints", "Endpoints on other nodes of Services with direct server return: ready where their node answers probes, masqueraded where it does not.", []string{"state"}, nil, k8smetrics.ALPHA, "")
	xdpDesc      = k8smetrics.NewDesc("tandem_uplink_accelerated", "1 if XDP forwards packets on an uplink, 0 if it cannot. Absent with --ebpf-acceleration=disabled.", []string{"device"}, nil, k8smetrics.ALPHA, "")
	yieldedDesc  = k8smetrics.NewDesc("tandem_yielded_timestamp_seconds", "Unix time at which the eBPF programs yielded new connections to another kube-proxy, before this process started. Absent if they did not.", nil, nil, k8smetrics.ALPHA, "")
	packetsDesc  = k8smetrics.NewDesc("tandem_packets_total", "Packets of Services seen by the packet programs, by verdict.", []string{"result"}, nil, k8smetrics.ALPHA, "")

	serviceLabels          = []string{"namespace", "service", "port", "protocol"}
	serviceConnectionsDesc = k8smetrics.NewDesc("tandem_service_connections_total", "Connections and UDP flows of a service port, of clients on this node or outside. Probes by which the node tries its own programs count as outside: a few a minute. The first 256 service ports have series; the others share one without a name.", append(serviceLabels, "client"), nil, k8smetrics.ALPHA, "")
	servicePacketsDesc     = k8smetrics.NewDesc("tandem_service_packets_total", "Translated packets of a service port, in both directions, without connections balanced at their socket.", serviceLabels, nil, k8smetrics.ALPHA, "")
	serviceBytesDesc       = k8smetrics.NewDesc("tandem_service_bytes_total", "Bytes of the packets in tandem_service_packets_total, with IP headers.", serviceLabels, nil, k8smetrics.ALPHA, "")

	flowFailuresDesc = k8smetrics.NewDesc("tandem_service_flow_failures_total", "TCP connections of clients outside and of pods that opted out to a service port that were not established: refused by a reset of the endpoint, or unanswered.", append(serviceLabels, "result"), nil, k8smetrics.ALPHA, "")

	refusalsDesc = k8smetrics.NewDesc("tandem_service_refusals_total", "Connections to a service port, of clients on this node or outside, that the proxy refused: rejected without endpoints, or dropped by traffic policy or source ranges.", append(serviceLabels, "client", "result"), nil, k8smetrics.ALPHA, "")

	closedDesc = k8smetrics.NewDesc("tandem_closed_udp_sockets_total", "UDP sockets closed because their backend was removed.", nil, nil, k8smetrics.ALPHA, "")
)

// tables is a collector that asks the datapath for current values at each scrape.
type tables struct {
	k8smetrics.BaseStableCollector
	source TableSource

	mu    sync.Mutex
	named map[Service]struct{} // without counts
}

// DescribeWithStability implements metrics.StableCollector.
func (t *tables) DescribeWithStability(ch chan<- *k8smetrics.Desc) {
	ch <- entriesDesc
	ch <- capacityDesc
	ch <- sizeDesc
	ch <- bytesDesc
	ch <- growthsDesc
	ch <- unplacedDesc
	ch <- closedDesc
	ch <- directDesc
	ch <- xdpDesc
	ch <- yieldedDesc
	ch <- packetsDesc
	ch <- serviceConnectionsDesc
	ch <- flowFailuresDesc
	ch <- refusalsDesc
	ch <- connectsDesc
	ch <- socketBytesDesc
	ch <- servicePacketsDesc
	ch <- serviceBytesDesc
}

// CollectWithStability implements metrics.StableCollector.
func (t *tables) CollectWithStability(ch chan<- k8smetrics.Metric) {
	now, ok := t.source()
	if !ok {
		return
	}
	for name, table := range now.ByName {
		ch <- k8smetrics.NewLazyConstMetric(entriesDesc, k8smetrics.GaugeValue, float64(table.Used), name)
		ch <- k8smetrics.NewLazyConstMetric(capacityDesc, k8smetrics.GaugeValue, float64(table.Max), name)
		ch <- k8smetrics.NewLazyConstMetric(sizeDesc, k8smetrics.GaugeValue, float64(table.Size), name)
	}
	if now.MapBytes > 0 {
		ch <- k8smetrics.NewLazyConstMetric(bytesDesc, k8smetrics.GaugeValue, float64(now.MapBytes))
		ch <- k8smetrics.NewLazyConstMetric(growthsDesc, k8smetrics.CounterValue, float64(now.MapGrowths))
	}
	if now.Unplaced >= 0 {
		ch <- k8smetrics.NewLazyConstMetric(unplacedDesc, k8smetrics.GaugeValue, float64(now.Unplaced))
	}
	if now.Direct > 0 {
		ch <- k8smetrics.NewLazyConstMetric(directDesc, k8smetrics.GaugeValue, float64(now.DirectReady), "ready")
		ch <- k8smetrics.NewLazyConstMetric(directDesc, k8smetrics.GaugeValue, float64(now.Direct-now.DirectReady), "masqueraded")
	}
	for device, is := range now.Accelerated {
		value := 0.0
		if is {
			value = 1
		}
		ch <- k8smetrics.NewLazyConstMetric(xdpDesc, k8smetrics.GaugeValue, value, device)
	}
	if now.ClosedSockets >= 0 {
		ch <- k8smetrics.NewLazyConstMetric(closedDesc, k8smetrics.CounterValue, float64(now.ClosedSockets))
	}
	if !now.LastYield.IsZero() {
		ch <- k8smetrics.NewLazyConstMetric(yieldedDesc, k8smetrics.GaugeValue, float64(now.LastYield.Unix()))
	}
	for result, n := range now.Packets {
		ch <- k8smetrics.NewLazyConstMetric(packetsDesc, k8smetrics.CounterValue, float64(n), result)
	}
	for _, s := range t.bounded(now.Services, now.Shared) {
		for _, c := range []struct {
			desc  *k8smetrics.Desc
			value uint64
		}{{servicePacketsDesc, s.Packets}, {serviceBytesDesc, s.Bytes}} {
			ch <- k8smetrics.NewLazyConstMetric(c.desc, k8smetrics.CounterValue, float64(c.value), s.Namespace, s.Name, s.Port, s.Protocol)
		}
		for client, o := range map[string]proxier.Outcomes{"node": s.Node, "outside": s.Outside} {
			ch <- k8smetrics.NewLazyConstMetric(serviceConnectionsDesc, k8smetrics.CounterValue, float64(o.Connections), s.Namespace, s.Name, s.Port, s.Protocol, client)
			for result, n := range map[string]uint64{"rejected": o.Rejected, "dropped": o.Dropped} {
				ch <- k8smetrics.NewLazyConstMetric(refusalsDesc, k8smetrics.CounterValue, float64(n), s.Namespace, s.Name, s.Port, s.Protocol, client, result)
			}
		}
		if s.Protocol != "UDP" {
			for result, n := range map[string]uint64{"refused": s.Refused, "unanswered": s.Unanswered} {
				ch <- k8smetrics.NewLazyConstMetric(flowFailuresDesc, k8smetrics.CounterValue, float64(n), s.Namespace, s.Name, s.Port, s.Protocol, result)
			}
		}
		if s.Signals != nil {
			s.Signals.collect(ch, s.Namespace, s.Name, s.Port, s.Protocol)
		}
	}
}

// bounded returns at most maxServices service ports by name, and the sum of the others. A
// service port keeps its series while it exists, so that its counters do not jump.
func (t *tables) bounded(list []Service, shared *Signals) []Service {
	t.mu.Lock()
	defer t.mu.Unlock()
	there := map[Service]struct{}{}
	for _, s := range list {
		there[Service{Namespace: s.Namespace, Name: s.Name, Port: s.Port, Protocol: s.Protocol}] = struct{}{}
	}
	if t.named == nil {
		t.named = map[Service]struct{}{}
	}
	for name := range t.named {
		if _, ok := there[name]; !ok {
			delete(t.named, name)
		}
	}
	var out []Service
	var others Service
	for _, s := range list {
		name := Service{Namespace: s.Namespace, Name: s.Name, Port: s.Port, Protocol: s.Protocol}
		if _, ok := t.named[name]; !ok && len(t.named) < maxServices {
			t.named[name] = struct{}{}
		}
		if _, ok := t.named[name]; ok {
			out = append(out, s)
			continue
		}
		others.Node = others.Node.Plus(s.Node)
		others.Outside = others.Outside.Plus(s.Outside)
		others.Packets += s.Packets
		others.Bytes += s.Bytes
		others.Refused += s.Refused
		others.Unanswered += s.Unanswered
		if s.Signals != nil {
			if others.Signals == nil {
				others.Signals = &Signals{}
			}
			others.Signals.add(s.Signals)
		}
	}
	if others.Signals != nil && shared != nil {
		others.Signals.add(shared)
	}
	if others.Node.Plus(others.Outside) != (proxier.Outcomes{}) {
		out = append(out, others)
	}
	return out
}
