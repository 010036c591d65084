// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// CarriersPath is where kube-proxy answers who carries what is not in the maps.
const CarriersPath = "/debug/carriers"

// Carriers is the answer, as JSON. Fields may be added; none changes its name or its
// meaning.
type Carriers struct {
	Node string `json:"node"`
	// Mode that runs.
	Mode string `json:"mode"`
	// Frontends that the maps of mode ebpf do not have for all clients, sorted by
	// service port and address.
	Frontends []Carried `json:"frontends"`
}

// Carried is a frontend for some of its clients.
type Carried struct {
	Namespace string         `json:"namespace"`
	Name      string         `json:"name"`
	Port      string         `json:"port"` // its name; empty for an unnamed one
	Protocol  string         `json:"protocol"`
	Kind      string         `json:"kind"`
	Address   netip.AddrPort `json:"address"`
	// Clients are all, or some of pod, host and outside.
	Clients string `json:"clients"`
	// Carrier is the tier; empty for none.
	Carrier string `json:"carrier"`
	// Reason is why the fast path does not carry it; empty where that does not run.
	Reason string `json:"reason"`
	// Set of endpoints, and how many there are.
	Set      string `json:"set"`
	Backends int    `json:"backends"`
	// Verdict on connections to an empty set; empty where there are backends.
	Verdict         string `json:"verdict"`
	AffinitySeconds int64  `json:"affinitySeconds"`
}

// Carrier says who carries a frontend for clients of an origin, and why the fast path
// does not. What the maps show is not asked for: shown is false.
type Carrier func(*proxier.Decision, *proxier.Frontend, proxier.Origin) (tier, reason string, shown bool)

// CarriersOf asks about every frontend of a node that is served.
func CarriersOf(node, mode string, table *proxier.Table, carrier Carrier) *Carriers {
	c := &Carriers{Node: node, Mode: mode, Frontends: []Carried{}}
	for _, change := range table.All() {
		d := change.New
		for i := range d.Frontends {
			if f := &d.Frontends[i]; f.Conflict == nil {
				c.Frontends = append(c.Frontends, carriedOf(d, f, carrier)...)
			}
		}
	}
	slices.SortFunc(c.Frontends, func(a, b Carried) int {
		return cmp.Or(a.CompareService(b.Namespace, b.Name, b.Port, b.Protocol), a.Address.Compare(b.Address), strings.Compare(a.Clients, b.Clients))
	})
	return c
}

// CompareService orders by service port.
func (c *Carried) CompareService(namespace, name, port, protocol string) int {
	return cmp.Or(strings.Compare(c.Namespace, namespace), strings.Compare(c.Name, name), strings.Compare(c.Port, port), strings.Compare(c.Protocol, protocol))
}

// carriedOf has one entry for the clients that all is alike for.
func carriedOf(d *proxier.Decision, f *proxier.Frontend, carrier Carrier) (list []Carried) {
	clients := map[Carried][]string{}
	for o := range proxier.Origins {
		tier, reason, shown := carrier(d, f, o)
		if !shown {
			continue
		}
		set := f.Routes[o].Set
		c := Carried{
			Namespace: d.Name.Namespace, Name: d.Name.Name, Port: d.Name.Port, Protocol: d.Name.Protocol.String(),
			Kind: f.Kind.String(), Address: f.Addr, Carrier: tier, Reason: reason,
			Set: set.String(), Backends: d.Size(set), AffinitySeconds: int64(d.Affinity.Seconds()),
		}
		if c.Backends == 0 {
			c.Verdict = d.Empty[set].String()
		}
		clients[c] = append(clients[c], o.String())
	}
	for c, names := range clients {
		c.Clients = strings.Join(names, ",")
		if len(names) == int(proxier.Origins) {
			c.Clients = "all"
		}
		list = append(list, c)
	}
	return list
}
