// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// PlacementsPath is where kube-proxy reports which datapath serves the frontends that are not
// in the maps.
const PlacementsPath = "/debug/carriers"

// Placements is the answer, as JSON. Later versions may add fields. They do not rename fields
// or change their meaning.
type Placements struct {
	Node string `json:"node"`
	// Mode is the running mode.
	Mode string `json:"mode"`
	// Frontends that the maps of mode ebpf lack for at least some clients, sorted by
	// service port and address.
	Frontends []Placement `json:"frontends"`
}

// Placement says which datapath serves a frontend for some of its clients.
type Placement struct {
	Namespace string         `json:"namespace"`
	Name      string         `json:"name"`
	Port      string         `json:"port"` // its name; empty for an unnamed one
	Protocol  string         `json:"protocol"`
	Kind      string         `json:"kind"`
	Address   netip.AddrPort `json:"address"`
	// Clients are all, or some of pod, host and outside.
	Clients string `json:"clients"`
	// Carrier is the datapath that serves it; empty if none does.
	Carrier string `json:"carrier"`
	// Reason is why the eBPF datapath does not serve it; empty in other modes.
	Reason string `json:"reason"`
	// Set is the backend set, and Backends its size.
	Set      string `json:"set"`
	Backends int    `json:"backends"`
	// Verdict applies to connections if the set is empty; otherwise it is empty.
	Verdict         string `json:"verdict"`
	AffinitySeconds int64  `json:"affinitySeconds"`
}

// PlacementFunc returns which datapath serves a frontend for clients of an origin, and why the
// eBPF datapath does not. Shown is false for frontends that are in the maps.
type PlacementFunc func(*proxier.Decision, *proxier.Frontend, proxier.Origin) (tier, reason string, shown bool)

// PlacementsOf calls of for every frontend of a node that is served.
func PlacementsOf(node, mode string, table *proxier.Table, of PlacementFunc) *Placements {
	p := &Placements{Node: node, Mode: mode, Frontends: []Placement{}}
	for _, change := range table.All() {
		d := change.New
		for i := range d.Frontends {
			if f := &d.Frontends[i]; f.Conflict == nil {
				p.Frontends = append(p.Frontends, placementsOf(d, f, of)...)
			}
		}
	}
	slices.SortFunc(p.Frontends, func(a, b Placement) int {
		return cmp.Or(a.CompareService(b.Namespace, b.Name, b.Port, b.Protocol), a.Address.Compare(b.Address), strings.Compare(a.Clients, b.Clients))
	})
	return p
}

// CompareService orders by service port.
func (p *Placement) CompareService(namespace, name, port, protocol string) int {
	return cmp.Or(strings.Compare(p.Namespace, namespace), strings.Compare(p.Name, name), strings.Compare(p.Port, port), strings.Compare(p.Protocol, protocol))
}

// placementsOf returns the placements of a frontend. Clients with the same placement share one.
func placementsOf(d *proxier.Decision, f *proxier.Frontend, of PlacementFunc) (list []Placement) {
	clients := map[Placement][]string{}
	for o := range proxier.Origins {
		tier, reason, shown := of(d, f, o)
		if !shown {
			continue
		}
		set := f.Routes[o].Set
		p := Placement{
			Namespace: d.Name.Namespace, Name: d.Name.Name, Port: d.Name.Port, Protocol: d.Name.Protocol.String(),
			Kind: f.Kind.String(), Address: f.Addr, Carrier: tier, Reason: reason,
			Set: set.String(), Backends: d.Size(set), AffinitySeconds: int64(d.Affinity.Seconds()),
		}
		if p.Backends == 0 {
			p.Verdict = d.Empty[set].String()
		}
		clients[p] = append(clients[p], o.String())
	}
	for p, names := range clients {
		p.Clients = strings.Join(names, ",")
		if len(names) == int(proxier.Origins) {
			p.Clients = "all"
		}
		list = append(list, p)
	}
	return list
}
