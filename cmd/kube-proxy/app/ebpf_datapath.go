// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"sync"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/observe/status"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
	"github.com/tandem-proxy/tandem/proxier/ebpf/sockets"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/placement"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

// ebpfDatapath is mode ebpf, open.
type ebpfDatapath struct {
	*host
	*parts
	programs *ebpf.Tier
	left     [proxier.Origins]error // why programs do not serve these clients
	rules    *iptables.Tier         // nil without a fallback, and beside another kube-proxy
	placed   *placement.Tier        // assigns frontends; nil if programs are alone
	logger   klog.Logger
}

func (d *ebpfDatapath) hasMaps() bool { return true }

func (d *ebpfDatapath) fallbackName() string {
	switch {
	case d.isShared():
		return "the other kube-proxy"
	case d.rules != nil:
		return "iptables rules"
	}
	return ""
}

func (d *ebpfDatapath) tier() proxier.Tier {
	switch {
	case d.placed == nil:
		return staleudp.Beside(d.programs, d.flows)
	case d.isShared(): // conntrack is the other's
		return d.placed
	}
	return staleudp.Beside(d.placed, d.flows)
}

func (d *ebpfDatapath) close() error {
	if d.placed == nil {
		return d.programs.Close()
	}
	d.placed.Wait()
	err := d.programs.Close()
	if d.rules != nil {
		err = errors.Join(err, d.rules.Close())
	}
	return err
}

func (d *ebpfDatapath) run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { d.followUplinks(ctx) })
	wg.Go(func() { d.programs.Run(ctx) })
	if d.optOuts != nil && d.left[proxier.FromPod] == nil {
		wg.Go(func() { d.optOuts(ctx, d.programs.SetOptOuts) })
	}
	if d.nodes != nil {
		wg.Go(func() {
			if d.programs.AwaitDirect(ctx) == nil {
				d.nodes(ctx, d.programs.SetCluster)
			}
		})
	}
	if d.rules != nil {
		wg.Go(func() { d.rules.Run(ctx) })
	}
	wg.Wait()
}

// followUplinks serves clients on the devices by which node traffic comes in, until ctx is
// done.
func (d *ebpfDatapath) followUplinks(ctx context.Context) {
	var last *devices.Uplinks
	d.uplinks.Watch(ctx, func(u devices.Uplinks) {
		same := last != nil && reflect.DeepEqual(last.Devices, u.Devices)
		if last = &u; same { // programs do not depend on the addresses
			return
		}
		if len(u.Unmatched) > 0 {
			d.logger.Info("No device matches --ebpf-devices", "names", u.Unmatched)
		}
		if len(u.Devices) == 0 {
			d.logger.Info("Found no device that receives traffic for this node; --ebpf-devices can name them")
		}
		if err := d.programs.SetUplinks(ctx, u.Devices); err != nil {
			d.logger.Error(err, "Cannot serve clients on some devices; retrying with the next full sync")
			return
		}
		d.logger.Info("Serving clients outside the node on these devices", "devices", deviceTexts(u.Devices))
	})
}

func deviceTexts(list []devices.Device) []string {
	texts := make([]string, len(list))
	for i, d := range list {
		texts[i] = d.String()
	}
	return texts
}

// refused is why programs do not serve a frontend for clients of an origin; nil if they do.
func (d *ebpfDatapath) refused(decision *proxier.Decision, f *proxier.Frontend, o proxier.Origin) error {
	why := d.programs.Supports
	if d.placed != nil {
		why = d.placed.Why
	}
	if err := why(decision, f); err != nil {
		return err
	}
	if why := f.LeftOf(o); why != "" {
		return errors.New(why)
	}
	return d.left[o]
}

func (d *ebpfDatapath) serves(decision *proxier.Decision, f *proxier.Frontend, o proxier.Origin) serving {
	switch refused := d.refused(decision, f, o); {
	case refused == nil:
		return serving{by: capabilities.ModeEBPF, bySocket: o != proxier.FromOutside}
	case d.isShared():
		return serving{by: foreign, refused: refused}
	case d.rules != nil && d.rules.Supports(decision, f) == nil:
		return serving{by: capabilities.ModeIPTables, refused: refused}
	default:
		return serving{refused: refused}
	}
}

func (d *ebpfDatapath) isUnplaced(decision *proxier.Decision) bool {
	return d.placed == nil && d.programs.IsUnplaced(decision.Index())
}

// checks is one condition for each uplink: its programs are attached, no other runs first, and they forward a packet of a client outside to an
// endpoint.
func (d *ebpfDatapath) checks(r *round) (list []health.Check) {
	at := uplinkFamiliesOf(r.table)
	frontends := outsideCandidates(d, r, at)
	for _, u := range d.programs.Uplinks() {
		c := health.Check{Name: "uplink-" + u.Name, OK: u.Err == nil}
		if u.Err != nil {
			c.Detail = u.Err.Error()
		}
		for family := range proxier.Families {
			if e := (uplinkFamily{u.Name, family}); u.Err == nil {
				e.probe(d.programs, frontends[e], at[e], &c)
			}
		}
		list = append(list, c)
	}
	return list
}

func (d *ebpfDatapath) lacks(decision *proxier.Decision, f *proxier.Frontend, uplinks []string) error {
	if d.serves(decision, f, proxier.FromOutside).by != capabilities.ModeEBPF {
		return nil
	}
	return d.programs.Lacks(decision, f, uplinks)
}

func (d *ebpfDatapath) followBinds(ctx context.Context, fn func()) error {
	return d.programs.FollowBinds(ctx, fn)
}

func (d *ebpfDatapath) describe(s *status.Status) {
	for _, u := range d.programs.Uplinks() {
		if d.config.Tandem.EBPF.Acceleration != config.AccelerationDisabled && u.Accelerated != nil {
			s.Degraded = append(s.Degraded, fmt.Sprintf("XDP does not forward on %s: %v", u.Name, u.Accelerated))
		}
	}
	peers := d.programs.DirectPeers()
	if lb := &d.config.Tandem.LoadBalancer; peers.Peers > 0 || lb.Mode != config.ForwardingSNAT {
		s.Direct = &status.Direct{Dispatch: lb.DSRDispatch, Endpoints: peers.Peers, Ready: peers.Ready}
	}
	if peers.Ready < peers.Peers {
		s.Degraded = append(s.Degraded, fmt.Sprintf("direct server return: %d of %d endpoints are on nodes that do not take it; connections to these are masqueraded", peers.Peers-peers.Ready, peers.Peers))
	}
}

func (d *ebpfDatapath) foreignPrograms() []string { return d.programs.ForeignPrograms() }

func (d *ebpfDatapath) detail(e *proxier.Explanation) string {
	switch unplaced := len(d.programs.Unplaced()); {
	case unplaced > 0 && d.placed == nil:
		return fmt.Sprintf("if it fits: %d service ports are over capacity, which 'tandemctl services' lists", unplaced)
	case e.Origin == proxier.FromOutside && e.Route.Direct:
		peers := d.programs.DirectPeers()
		return fmt.Sprintf("by packets: an endpoint sees the client's address and answers it directly, one on a node that does not take that sees this node's (%d of %d endpoints elsewhere take it)", peers.Ready, peers.Peers)
	case e.Origin == proxier.FromOutside:
		return "by packets: an endpoint on this node sees the client's address, one elsewhere sees this node's"
	case e.Origin == proxier.FromPod && e.Route.Source == proxier.Masquerade:
		return "at the pod's socket, without masquerading: endpoints see the client's address"
	}
	return ""
}

func (d *ebpfDatapath) otherEnded() {
	if d.placed != nil {
		d.placed.OtherEnded()
	}
}

func (d *ebpfDatapath) foundOther(listeners []netip.AddrPort) { d.programs.AwaitOther(listeners) }

// flowsEnded closes the sockets of this node that netfilter translated for, where programs
// serve: a socket that is connected to a frontend bypasses them, and what it sends would be
// lost.
func (d *ebpfDatapath) flowsEnded(ended []conntrack.Flow) {
	byRules := func(netip.AddrPort) bool { return false }
	if d.placed != nil {
		byRules = d.placed.FallbackHas(proxier.UDP)
	}
	var pairs []sockets.Pair
	for i := range ended {
		// A flow that was not translated may go where it is meant to.
		if f := &ended[i]; f.Translated() && !byRules(f.Destination) {
			pairs = append(pairs, sockets.Pair{Local: f.Source, Remote: f.Destination})
		}
	}
	if len(pairs) > 0 {
		d.programs.CloseUntranslated(pairs)
	}
}

func (d *ebpfDatapath) rulePackets() (metrics.RulePackets, bool) {
	if d.rules == nil {
		return metrics.RulePackets{}, false
	}
	return rulePackets(d.rules, d.logger)
}

func (d *ebpfDatapath) tables() (metrics.Tables, bool) {
	t := metrics.Tables{ByName: map[string]metrics.Table{}, ClosedSockets: int64(d.programs.ClosedSockets()), LastYield: d.programs.LastYield(), Packets: map[string]uint64{}}
	peers := d.programs.DirectPeers()
	t.Direct, t.DirectReady = peers.Peers, peers.Ready
	t.Accelerated = map[string]bool{}
	for _, u := range d.programs.Uplinks() {
		if d.config.Tandem.EBPF.Acceleration != config.AccelerationDisabled {
			t.Accelerated[u.Name] = u.Accelerated == nil
		}
	}
	t.Unplaced = len(d.programs.Unplaced())
	if d.placed != nil {
		t.Unplaced = d.placed.Overflow()
	}
	for name, c := range d.programs.Capacities() {
		t.ByName[name] = metrics.Table{Used: c.Used, Size: c.Max, Max: c.Limit}
	}
	growth := d.programs.Growth()
	t.MapBytes, t.MapGrowths = growth.Bytes, growth.Steps
	packets, err := d.programs.Packets()
	if err != nil {
		d.logger.Error(err, "Cannot read the packet verdict counters; metrics lack them")
	}
	for _, c := range packets {
		t.Packets[c.Result] = c.Count
	}
	traffic, err := d.programs.Traffic()
	if err != nil {
		d.logger.Error(err, "Cannot read the counters of Services; metrics lack them")
	}
	for _, s := range traffic {
		t.Services = append(t.Services, metrics.Service{
			Namespace: s.Namespace, Name: s.Name, Port: s.Port, Protocol: s.Protocol,
			Node: s.Node, Outside: s.Outside, Packets: s.Packets, Bytes: s.Bytes, Refused: s.Refused, Unanswered: s.Unanswered,
			Signals: d.signals(s.Protocol, &s.Signals),
		})
	}
	shared, err := d.programs.SharedSignals()
	if err != nil {
		d.logger.Error(err, "Cannot read the signals of Services; metrics lack some")
	}
	t.Shared = d.signals(proxier.TCP.String(), &shared)
	return t, true
}
