// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/proxier"
)

// uplinkFamily is where packets of clients outside come in: an uplink, and a family of its addresses.
type uplinkFamily struct {
	uplink string
	family proxier.Family
}

// uplinkFamiliesOf are those of this node, each with an address of the uplink at which NodePorts are served; an invalid one if there is none.
func uplinkFamiliesOf(table *proxier.Table) map[uplinkFamily]netip.Addr {
	facts, rules := table.Facts(), table.NodeRules()
	found := map[uplinkFamily]netip.Addr{}
	for _, a := range facts.UplinkAddrs {
		if !a.Addr.IsGlobalUnicast() {
			continue
		}
		e := uplinkFamily{a.Device, proxier.FamilyOf(a.Addr)}
		node := found[e]
		if _, served := slices.BinarySearchFunc(rules.NodePortAddrs, a.Addr, netip.Addr.Compare); served && !node.IsValid() {
			node = a.Addr
		}
		found[e] = node
	}
	return found
}

// outsideCandidates are frontends for clients outside that programs serve and that have an endpoint, some for each uplink and family, those
// without affinity first: it would remember a client. Each round has others.
func outsideCandidates(open activeMode, r *round, families map[uplinkFamily]netip.Addr) map[uplinkFamily][]candidate {
	chosen := map[uplinkFamily][]candidate{}
	for _, c := range r.table.All() {
		d := c.New
		cost := 0
		if d.Affinity > 0 {
			cost = 1
		}
		for i := range d.Frontends {
			f := &d.Frontends[i]
			switch f.Kind {
			case proxier.NodePort, proxier.ExternalIP, proxier.LoadBalancer:
			default:
				continue
			}
			if f.Conflict != nil || d.Size(f.Routes[proxier.FromOutside].Set) == 0 || open.isUnplaced(d) || open.serves(d, f, proxier.FromOutside).by != capabilities.ModeEBPF {
				continue
			}
			next := candidate{d, f, cost, r.rankOf(d, i)}
			for e, node := range families {
				if e.family == proxier.FamilyOf(f.Addr.Addr()) && (node.IsValid() || !f.Kind.Wildcard()) {
					chosen[e] = next.among(chosen[e])
				}
			}
		}
	}
	return chosen
}

// prober is *ebpf.Tier.
type prober interface {
	Probe(uplink string, d *proxier.Decision, f *proxier.Frontend, node netip.Addr) (netip.AddrPort, error)
}

// probe adds the result for one of these frontends to a check: whether the programs forward a packet to it to an endpoint. It is the first that can be tried.
func (e uplinkFamily) probe(by prober, frontends []candidate, node netip.Addr, to *health.Check) {
	for _, c := range frontends {
		at := c.frontend.Addr
		if c.frontend.Kind.Wildcard() {
			at = netip.AddrPortFrom(node, at.Port())
		}
		endpoint, err := by.Probe(e.uplink, c.decision, c.frontend, node)
		if err == nil && !endpoint.IsValid() {
			continue
		}
		if to.Detail != "" {
			to.Detail += "; "
		}
		to.Detail += fmt.Sprintf("%s %s of %s", c.decision.Name.Protocol, at, c.decision.Name)
		if err == nil {
			to.Detail += " leads to " + endpoint.String()
			return
		}
		to.OK = false
		to.Detail += ": " + err.Error()
		return
	}
}
