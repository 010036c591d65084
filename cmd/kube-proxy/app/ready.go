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

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/observe/selfprobe"
	"github.com/tandem-proxy/tandem/proxier"
)

// probed is who carries a frontend, and in which family: each is asked for itself.
type probed struct {
	tier   string
	family proxier.Family
}

func (p probed) String() string { return fmt.Sprintf("%s-%s", p.tier, p.family) }

// candidate is a frontend to dial.
type candidate struct {
	name     string
	frontend selfprobe.Frontend
	// cost is what others notice of it, and lot chooses among equals.
	cost int
	lot  uint32
}

func (c *candidate) compare(o *candidate) int {
	return cmp.Or(cmp.Compare(c.cost, o.cost), cmp.Compare(c.lot, o.lot))
}

// maxTries is how many frontends are dialled until one leads to an endpoint: one that refuses
// at once says nothing about the kernel.
const maxTries = 3

// candidates are the frontends that cost least, some for each tier and family that has any
// with an endpoint, the best first.
func (p *proxy) candidates(table *proxier.Table) map[probed][]candidate {
	chosen := map[probed][]candidate{}
	for _, c := range table.All() {
		d := c.New
		if d.Name.Protocol != proxier.TCP && d.Name.Protocol != proxier.UDP || p.unplaced(d) {
			continue
		}
		for i := range d.Frontends {
			f := &d.Frontends[i]
			set := f.Routes[proxier.FromHost].Set
			if f.Kind != proxier.ClusterIP || f.Conflict != nil || d.Size(set) == 0 {
				continue
			}
			tier, _, _ := p.carrier(d, f, proxier.FromHost)
			if tier == "" || tier != string(capabilities.ModeEBPF) && d.Name.Protocol != proxier.TCP {
				continue // nobody else is sent datagrams that mean nothing
			}
			next := candidate{name: d.Name.String(), cost: costOf(d, tier), lot: lotOf(p.opts.nodeName, d)}
			is := probed{tier, proxier.FamilyOf(f.Addr.Addr())}
			at, _ := slices.BinarySearchFunc(chosen[is], next, func(a, b candidate) int { return a.compare(&b) })
			if at == maxTries {
				continue
			}
			next.frontend = selfprobe.Frontend{Protocol: d.Name.Protocol, Addr: f.Addr, Backends: backendsOf(d, set)}
			best := slices.Insert(chosen[is], at, next)
			chosen[is] = best[:min(len(best), maxTries)]
		}
	}
	return chosen
}

// unplaced says that there is no room for a service port, and nobody else to carry it.
func (p *proxy) unplaced(d *proxier.Decision) bool {
	p.tierMu.Lock()
	defer p.tierMu.Unlock()
	if p.tiers.fast == nil || p.tiers.placed != nil {
		return false
	}
	_, unplaced := p.tiers.fast.Unplaced()[d.Index()]
	return unplaced
}

// costOf ranks frontends: where sockets are translated, one of UDP costs no packet. All
// nodes together would be a load for the API server, and affinity would remember this node.
func costOf(d *proxier.Decision, tier string) (cost int) {
	if tier == string(capabilities.ModeEBPF) && d.Name.Protocol != proxier.UDP {
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

// lotOf spreads the nodes over Services.
func lotOf(node string, d *proxier.Decision) uint32 {
	h := fnv.New32a()
	_, _ = fmt.Fprint(h, node, " ", d.Name, " ", d.Name.Protocol) // never fails
	return h.Sum32()
}

func backendsOf(d *proxier.Decision, set proxier.Set) (list []netip.AddrPort) {
	for i := range d.Backends {
		if b := &d.Backends[i]; b.Members&set.Member() != 0 && proxier.FamilyOf(b.Addr.Addr()) == set.Family() {
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
	all := p.candidates(table)
	for _, is := range slices.SortedFunc(maps.Keys(all), func(a, b probed) int { return cmp.Compare(a.String(), b.String()) }) {
		list = append(list, check(ctx, is, all[is]))
	}
	return list
}

// check dials until a frontend leads to an endpoint; it tells of the first if none does.
func check(ctx context.Context, is probed, candidates []candidate) (first health.Check) {
	by := selfprobe.ByPackets
	if is.tier == string(capabilities.ModeEBPF) {
		by = selfprobe.BySocket
	}
	for i, c := range candidates {
		check := health.Check{Name: is.String(), Detail: fmt.Sprintf("%s %s of %s", c.frontend.Protocol, c.frontend.Addr, c.name)}
		to, err := by(ctx, c.frontend)
		if err == nil {
			check.OK = true
			check.Detail += " leads to " + to.String()
			return check
		}
		if check.Detail += ": " + err.Error(); i == 0 {
			first = check
		}
	}
	return first
}
