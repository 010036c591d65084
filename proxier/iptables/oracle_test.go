// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/netfilter"
	"github.com/tandem-proxy/tandem/test/oracle"
)

// traced is a tier whose rules are applied to traced packets. At random, reproducible by the seed,
// processes restart, calls of tools fail, and time passes.
type traced struct {
	*simulatedTier
	rng    *rand.Rand
	tables [proxier.Families]*netfilter.Tables
	now    time.Time
	// rules and there are what a new process learns at its start.
	rules *proxier.NodeRules
	there map[uint32]*proxier.Decision
	// led is when clients were last sent to backends with affinity.
	led map[led]sighting
}

type led struct {
	port   proxier.ServicePortName
	client netip.Addr
	to     netip.AddrPort
}

// sighting is the last connection of a client. If its affinity timeout has passed once, the kernel may
// have dropped the record, even if a longer timeout is configured later.
type sighting struct {
	at      time.Time
	expired bool
}

// newTraced returns such a tier. spoil may change the input of restores.
func newTraced(seed uint64, spoil func(input string) string) *traced {
	t := &traced{
		rng: rand.New(rand.NewPCG(seed, 3)), now: time.Unix(1e9, 0), there: map[uint32]*proxier.Decision{}, led: map[led]sighting{},
	}
	tools := newSimulated()
	tools.Simulates = variants[t.rng.IntN(len(variants))]
	t.tables = tools.Tables
	for _, tables := range t.tables {
		tables.Now = func() time.Time { return t.now }
		tables.Random = t.rng.Float64
	}
	failing := t.chance(0.3)
	t.simulatedTier = newSimulatedTier(Options{Tools: &spoiledTools{Tools: tools, spoil: spoil, fails: func() bool { return failing && t.chance(0.1) }}})
	return t
}

func (t *traced) chance(p float64) bool { return t.rng.Float64() < p }

// spoiledTools fail at random, or write a changed input.
type spoiledTools struct {
	Tools
	fails func() bool
	spoil func(string) string
}

var errOutOfOrder = errors.New("out of order")

func (t *spoiledTools) Restore(ctx context.Context, f proxier.Family, input []byte) error {
	fails := t.fails()
	if fails && len(input)%2 == 0 {
		return errOutOfOrder
	}
	if t.spoil != nil {
		input = []byte(t.spoil(string(input)))
	}
	err := t.Tools.Restore(ctx, f, input)
	if fails {
		return errOutOfOrder // although it was written
	}
	return err
}

func (t *traced) Sync(ctx context.Context, u proxier.Update) error {
	if u.NodeRules != nil {
		t.rules = u.NodeRules
	}
	for _, c := range u.Changes {
		if c.New != nil {
			t.there[c.Index()] = c.New
			continue
		}
		delete(t.there, c.Index())
	}
	all := t.all()
	if t.chance(0.05) {
		t.simulatedTier = newSimulatedTier(t.opts)
		u = all
	}
	err := t.simulatedTier.Sync(ctx, u)
	if err == nil && t.chance(0.2) {
		err = t.simulatedTier.Sync(ctx, all) // the periodic sync
	}
	for errors.Is(err, errOutOfOrder) {
		err = t.simulatedTier.Sync(ctx, proxier.Update{})
	}
	t.now = t.now.Add([]time.Duration{0, time.Second, time.Minute, 2 * time.Hour, 25 * time.Hour}[t.rng.IntN(5)])
	t.forget()
	return err
}

// all is the update that a process gets that begins.
func (t *traced) all() proxier.Update {
	u := proxier.Update{Full: true, NodeRules: t.rules}
	for _, index := range slices.Sorted(maps.Keys(t.there)) {
		u.Changes = append(u.Changes, proxier.PortChange{New: t.there[index]})
	}
	return u
}

// forget deletes records that no rule has any more: without its last frontend, or without the
// affinity of its service port, a backend has no records of clients.
func (t *traced) forget() {
	remembers, affinity := map[proxier.ServicePortName]map[netip.AddrPort]bool{}, map[proxier.ServicePortName]time.Duration{}
	for _, d := range t.there {
		if d.Affinity == 0 {
			continue
		}
		var used [proxier.Sets]bool
		for i := range d.Frontends {
			if d.Frontends[i].Conflict == nil {
				for _, r := range d.Frontends[i].Routes {
					used[r.Set] = true
				}
			}
		}
		remembers[d.Name], affinity[d.Name] = map[netip.AddrPort]bool{}, d.Affinity
		for _, b := range d.Backends {
			for set := range proxier.Sets {
				if used[set] && set.Family() == proxier.FamilyOf(b.Addr.Addr()) && b.Members&set.Member() != 0 {
					remembers[d.Name][b.Addr] = true
				}
			}
		}
	}
	maps.DeleteFunc(t.led, func(l led, _ sighting) bool { return !remembers[l.port][l.to] })
	for l, s := range t.led {
		s.expired = s.expired || t.now.Sub(s.at) > affinity[l.port]
		t.led[l] = s
	}
}

// Check implements oracle.Tier: the rules send packets to all backends with the same probability, or
// refuse them, and masquerade where required.
func (t *traced) Check(c *oracle.Cluster, flow proxier.Flow, want *oracle.Answer) error {
	to := flow.Destination.Addr()
	outcome := want.Outcome
	switch {
	case to.IsUnspecified():
		return nil // no packet goes to such an address
	case to == netip.IPv6Loopback():
		outcome = proxier.Pass // IPv6 has no route_localnet
	}
	local := func(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(c.Facts.LocalAddrs, a) }
	device := flow.Device
	if local(flow.Source.Addr()) {
		if slices.Contains(c.Facts.Uplinks, flow.Device) {
			return nil // no other machine has this address
		}
		if device = ""; want.Origin != proxier.FromHost {
			return nil // no packet of this host enters through a pod's device
		}
	}
	if want.Kind == proxier.ClusterIP && outcome != proxier.Forward && local(to) {
		return nil // the address belongs to the device then
	}
	p := netfilter.Packet{
		Src: flow.Source, Dst: flow.Destination, Protocol: flow.Protocol, In: device, Out: "eth0", Local: local,
	}
	tables := t.tables[proxier.FamilyOf(to)]
	err := t.branches(tables, p, outcome, want)
	if err != nil && outcome == proxier.Forward && slices.ContainsFunc(c.Frontends(), func(f oracle.Frontend) bool {
		return f.Owner.Protocol == flow.Protocol && slices.Contains(want.Backends, f.Addr)
	}) {
		return nil // filter rules cannot distinguish translated packets from direct ones
	}
	if err != nil {
		return err
	}
	if outcome != proxier.Forward || want.Affinity == 0 {
		return nil
	}
	// Further connections follow the first.
	first := tables.Trace(p)
	t.led[led{want.Owner, flow.Source.Addr(), first.To}] = sighting{at: t.now}
	return t.branches(tables, p, outcome, want)
}

// branches compares all possible results for a packet.
func (t *traced) branches(tables *netfilter.Tables, p netfilter.Packet, outcome proxier.Outcome, want *oracle.Answer) error {
	all := tables.Branches(p)
	wrong := func(format string, args ...any) error {
		texts := make([]string, len(all))
		for i, b := range all {
			texts[i] = fmt.Sprintf("%.9f %s", b.Probability, b.Result)
		}
		return fmt.Errorf(format+"; the rules say\n%s", append(args, strings.Join(texts, "\n"))...)
	}
	targets := map[netip.AddrPort]float64{}
	for _, b := range all {
		verdict, hidden := netfilter.Accept, false
		switch outcome {
		case proxier.Rejected:
			verdict = netfilter.Reject
		case proxier.Dropped:
			verdict = netfilter.Drop
		case proxier.Forward:
			// Packets that enter and stay on this host need no masquerading: replies are sent from here.
			hidden = (want.Source != proxier.KeepSource || p.Src.Addr() == b.To.Addr()) && (p.In == "" || !p.Local(b.To.Addr()))
		case proxier.Pass:
			if b.To != p.Dst {
				return wrong("the packet's destination was changed")
			}
			if p.Dst.Addr().IsLoopback() && !p.Src.Addr().IsLoopback() {
				continue // the kernel may drop it
			}
		}
		if b.Verdict != verdict {
			return wrong("the packet must not be %sed", b.Verdict)
		}
		if verdict == netfilter.Accept && b.Masqueraded != hidden {
			return wrong("wrong source address: masqueraded is %t", b.Masqueraded)
		}
		targets[b.To] += b.Probability
	}
	if outcome != proxier.Forward {
		return nil
	}
	surely, maybe := t.remembered(p.Src.Addr(), want)
	switch only := all[0].To; {
	case len(targets) == 1 && slices.Contains(append(surely, maybe...), only):
		return nil
	case len(surely) > 0:
		return wrong("the client has affinity to %s", surely)
	}
	share := 1 / float64(len(want.Backends))
	for _, a := range want.Backends {
		if math.Abs(targets[a]-share) > 1e-6 { // the kernel stores probabilities with 31 bits
			return wrong("%s gets %.9f of the connections", a, targets[a])
		}
	}
	if len(targets) != len(want.Backends) {
		return wrong("%d targets", len(targets))
	}
	return nil
}

// remembered returns the backends to which a client has affinity, surely or maybe.
func (t *traced) remembered(client netip.Addr, want *oracle.Answer) (surely, maybe []netip.AddrPort) {
	for _, to := range want.Backends {
		s, ok := t.led[led{want.Owner, client, to}]
		switch {
		case !ok || t.now.Sub(s.at) > want.Affinity:
		case s.expired:
			maybe = append(maybe, to)
		default:
			surely = append(surely, to)
		}
	}
	return surely, maybe
}

func oracleWorlds(events oracle.Events, share int, spoil func(string) string) oracle.Worlds {
	return oracle.Worlds{
		Share: share, Steps: 15, Flows: 60, Events: events,
		Tier: func(seed uint64) oracle.Tier { return newTraced(seed, spoil) },
	}
}

// TestOracle: after any history, rules do with packets what the oracle expects. For a run of a
// night:
//
//	go test ./proxier/iptables -run=TestOracle$ -timeout=0 -oracle.flows=1000000000
func TestOracle(t *testing.T) {
	t.Run("small", func(t *testing.T) { oracleWorlds(oracle.Small, 15, nil).Run(t) })
	t.Run("crowded", func(t *testing.T) { oracleWorlds(oracle.Crowded, 150, nil).Run(t) })
}

// TestOracleFinds: the comparison finds rules that are missing or wrong.
func TestOracleFinds(t *testing.T) {
	for _, spoiled := range []struct{ name, rules, become string }{
		{"no masquerading of ClusterIPs", "-A KUBE-SV[CL]-.* -j KUBE-MARK-MASQ\n", ""},
		{"no masquerading of external clients", "-A KUBE-EXT-.* -j KUBE-MARK-MASQ\n", ""},
		{"no masquerading of who dials itself", "-A KUBE-SEP-.* -j KUBE-MARK-MASQ\n", ""},
		{"local endpoints for all", "-j KUBE-SVL-", "-j KUBE-SVC-"},
		{"no drop by source", "-[AI] KUBE-PROXY-FIREWALL.* -j DROP\n", ""},
		{"source ranges ignored", "(-A KUBE-FW-[A-Z0-9]+) -s [^ ]+", "$1"},
		{"reject instead of drop", "(KUBE-(?:EXTERNAL-)?SERVICES .*) -j DROP", "$1 -j REJECT"},
		{"drop instead of reject", "-j REJECT .*", "-j DROP"},
		{"silence about NodePorts", "-[AI] KUBE-REFUSED-PORTS .*\n", ""},
		{"other shares", "--probability 0.5", "--probability 0.4"},
		{"the last endpoint for most", "--probability 0.33333333349", "--probability 0.25000000000"},
		{"affinity without a memory", "-m recent --set .* --rsource ", ""},
		{"affinity for a shorter time", "--seconds [0-9]+ --reap", "--seconds 1 --reap"},
		{"NodePorts everywhere", "-m addrtype --dst-type LOCAL -j KUBE-NODEPORTS", "-j KUBE-NODEPORTS"},
		{"NodePorts of one protocol", "-[AI] KUBE-NODEPORTS .*-p sctp.*\n", ""},
		{"all are pods", "! -s 10.244.1.0/24", "-s 10.244.1.0/24"},
		{"unallocated addresses not rejected", "-A KUBE-PROXY-FIREWALL .*unallocated ClusterIPs.*\n", ""},
	} {
		t.Run(spoiled.name, func(t *testing.T) {
			t.Parallel()
			rules, changed := regexp.MustCompile(spoiled.rules), 0
			spoil := func(input string) string {
				changed += len(rules.FindAllString(input, -1))
				return rules.ReplaceAllString(input, spoiled.become)
			}
			err := oracleWorlds(oracle.Small, 1, spoil).Find(100)
			if err == nil || !strings.Contains(err.Error(), "tier: ") {
				t.Errorf("%d rules were changed, but the comparison found: %v", changed, err)
			}
		})
	}
}
