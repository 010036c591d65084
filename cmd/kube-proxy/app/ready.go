// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/observe/selfprobe"
	"github.com/tandem-proxy/tandem/proxier"
)

// probed is a datapath in one address family. Each is probed on its own.
type probed struct {
	by       capabilities.Mode
	bySocket bool
	family   proxier.Family
}

func (p probed) String() string { return fmt.Sprintf("%s-%s", p.by, p.family) }

// round is one look at the conditions of readiness. Each probes other frontends than the one before it.
type round struct {
	table  *proxier.Table
	number uint64
	seed   uint32
}

func newRound(table *proxier.Table, node string, number uint64) *round {
	h := fnv.New32a()
	_, _ = fmt.Fprint(h, node, " ", number) // never fails
	return &round{table, number, h.Sum32()}
}

// candidate is a frontend to probe.
type candidate struct {
	decision *proxier.Decision
	frontend *proxier.Frontend
	// cost ranks what others notice of it; tieBreak chooses among equals.
	cost     int
	tieBreak uint32
}

func (c *candidate) compare(o *candidate) int {
	return cmp.Or(cmp.Compare(c.cost, o.cost), cmp.Compare(c.tieBreak, o.tieBreak))
}

// maxTries is how many frontends are probed until one leads to an endpoint: one that refuses
// at once says nothing about the kernel.
const maxTries = 3

// among returns the candidates that cost least of a list and one more.
func (c *candidate) among(best []candidate) []candidate {
	at, _ := slices.BinarySearchFunc(best, *c, func(a, b candidate) int { return a.compare(&b) })
	if at == maxTries {
		return best
	}
	best = slices.Insert(best, at, *c)
	return best[:min(len(best), maxTries)]
}

// candidates are the frontends that cost least, some for each datapath and family that has
// any with an endpoint, the best first. Each round has others of the same cost.
func candidates(open activeMode, r *round) map[probed][]candidate {
	chosen := map[probed][]candidate{}
	for _, c := range r.table.All() {
		d := c.New
		if d.Name.Protocol != proxier.TCP && d.Name.Protocol != proxier.UDP || open.isUnplaced(d) {
			continue
		}
		for i := range d.Frontends {
			f := &d.Frontends[i]
			if f.Kind.External() || f.Conflict != nil || d.Size(f.Routes[proxier.FromHost].Set) == 0 || f.LeftOf(proxier.FromHost) != "" {
				continue
			}
			s := open.serves(d, f, proxier.FromHost)
			if s.by == "" || s.by == foreign || !s.bySocket && d.Name.Protocol != proxier.TCP {
				continue // a probe of UDP by packets would send endpoints datagrams they do not expect
			}
			next := candidate{d, f, costOf(d, s.bySocket, r.number), r.rankOf(d, i)}
			is := probed{s.by, s.bySocket, proxier.FamilyOf(f.Addr.Addr())}
			chosen[is] = next.among(chosen[is])
		}
	}
	return chosen
}

// costOf ranks frontends. Where sockets are translated, a probe of UDP sends no packet, which counts in every other round: in the rest
// TCP has its turn. The API server comes last, as all nodes together would be a load for it, and affinity before it, as it would
// remember this node.
func costOf(d *proxier.Decision, bySocket bool, round uint64) (cost int) {
	if bySocket && d.Name.Protocol != proxier.UDP && round%2 == 0 {
		cost++
	}
	if d.Affinity > 0 {
		cost += 2
	}
	if d.Name.NamespacedName.String() == "default/kubernetes" {
		cost += 4
	}
	return cost
}

// rankOf spreads nodes and rounds over frontends, of which there may be tens of thousands.
func (r *round) rankOf(d *proxier.Decision, frontend int) uint32 {
	x := r.seed ^ d.Index()*0x9e3779b1 ^ uint32(frontend)*0x85ebca6b
	x = (x ^ x>>16) * 0x7feb352d
	x = (x ^ x>>15) * 0x846ca68b
	return x ^ x>>16
}

func backendsOf(d *proxier.Decision, set proxier.Set) (list []netip.AddrPort) {
	for i := range d.Backends {
		if b := &d.Backends[i]; b.In(set) {
			list = append(list, b.Addr)
		}
	}
	return list
}

// probe is health.ReadinessOptions.Probe.
func (p *proxy) probe(ctx context.Context) (list []health.Check) {
	table := p.explain.table.Load()
	if table == nil {
		return []health.Check{{Name: "probe", Detail: "nothing is programmed yet"}}
	}
	var all map[probed][]candidate
	var foreign []string
	p.rounds++
	r := newRound(table, p.opts.nodeName, p.rounds)
	p.withActive(func(open activeMode) {
		list = open.checks(r)
		all = candidates(open, r)
		foreign = open.foreignPrograms()
	})
	failed := slices.ContainsFunc(list, func(c health.Check) bool { return !c.OK })
	for _, is := range slices.SortedFunc(maps.Keys(all), func(a, b probed) int { return cmp.Compare(a.String(), b.String()) }) {
		result, first := check(ctx, is, all[is])
		if !result.OK && is.bySocket && len(foreign) > 0 {
			result.Detail += "; programs of others on the cgroup may be the cause: " + strings.Join(foreign, ", ")
		}
		if first != nil {
			failed = true
			klog.FromContext(ctx).V(2).Info("A probe of a Service failed", "datapath", is.String(), "frontend", all[is][0].frontend.Addr, "service", all[is][0].decision.Name, "err", first)
		}
		list = append(list, result)
	}
	p.resync.probed(ctx, failed, time.Now())
	if limit := p.opts.Config.Tandem.ReadyMaxAPIAge.Duration; limit != 0 && p.client != nil {
		list = append(list, checkAPI(p.client.LastEvents(), limit, time.Now()))
	}
	return list
}

// checksInterval is the time between two looks at the conditions of readiness where nothing asks /readyz, as with kubeadm's DaemonSet.
const checksInterval = 10 * time.Second

// followChecks has Services probed, and so what is wrong repaired and shown in metrics, until ctx is done.
func (p *proxy) followChecks(ctx context.Context) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		ok := map[string]bool{}
		for _, c := range p.ready.Checks(ctx) {
			ok[c.Name] = c.OK
		}
		p.metrics.Checks(ok)
	}, checksInterval)
}

// checkAPI fails if the API server has sent no event or bookmark for a resource for longer than the limit.
func checkAPI(last map[string]time.Time, limit time.Duration, now time.Time) health.Check {
	c := health.Check{Name: "api", OK: true, Detail: fmt.Sprintf("the API server has sent an event or bookmark for each watched resource in the last %v", limit)}
	for _, resource := range slices.Sorted(maps.Keys(last)) {
		if age := now.Sub(last[resource]); age > limit {
			c.OK, c.Detail = false, fmt.Sprintf("the API server has sent no event or bookmark for %s in the last %v, longer than --ready-max-api-age=%v", resource, age.Round(time.Second), limit)
			break
		}
	}
	return c
}

// check dials until a frontend leads to an endpoint. If none does, it returns the first
// failure. It also returns why the first frontend did not, whatever the others did.
func check(ctx context.Context, is probed, candidates []candidate) (result health.Check, first error) {
	dial := selfprobe.ByPackets
	if is.bySocket {
		dial = selfprobe.BySocket
	}
	for i, c := range candidates {
		d, f := c.decision, c.frontend
		check := health.Check{Name: is.String(), Detail: fmt.Sprintf("%s %s of %s", d.Name.Protocol, f.Addr, d.Name)}
		to, err := dial(ctx, selfprobe.Frontend{Protocol: d.Name.Protocol, Addr: f.Addr, Backends: backendsOf(d, f.Routes[proxier.FromHost].Set)})
		if err == nil {
			check.OK = true
			check.Detail += " leads to " + to.String()
			return check, first
		}
		if check.Detail += ": " + err.Error(); i == 0 {
			result, first = check, err
		}
	}
	return result, first
}
