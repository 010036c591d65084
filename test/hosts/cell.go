// SPDX-License-Identifier: Apache-2.0

package hosts

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Cell is something that a client does. As a pattern, empty fields match everything.
type Cell struct {
	// Client is FromPod, FromVM, FromHost, Outside or the name of another client of the profile.
	Client string
	// Frontend is the kind of address that it dials.
	Frontend string
	// Network is tcp4, tcp6, udp4 or udp6; in patterns also tcp, udp, 4 or 6.
	Network string
	// Backend is where the Service has endpoints: Here, There, or both.
	Backend string
	// Policy is that of both internal and external traffic.
	Policy string
	// Kind is what it does there.
	Kind string
}

// Clients.
const (
	FromPod  = "pod"
	FromHost = "host"
	Outside  = "outside"
	// FromVM is a virtual machine in the client's pod: no socket of this kernel sends its packets.
	FromVM = "vm"
)

// Frontends.
const (
	ClusterIP    = "ClusterIP"
	NodePort     = "NodePort"
	ExternalIP   = "external-IP"
	LoadBalancer = "load-balancer-IP"
)

// Where endpoints are.
const (
	Here  = "here"
	There = "there"
	Both  = "both"
)

// Policies.
const (
	Cluster = "Cluster"
	Local   = "Local"
)

// Kinds.
const (
	// Request is one request and its answer.
	Request = "request"
	// Transfer is a megabyte both ways by TCP, and datagrams of several sizes by UDP.
	Transfer = "transfer"
	// Life is a connection, and new ones, while endpoints change and the proxy is killed.
	Life = "life"
	// Crowd are many connections, beside those of pods that the node masquerades.
	Crowd = "crowd"
	// Gap is a connection that begins while a route is missing.
	Gap = "gap"
)

func (c Cell) String() string {
	var parts []string
	for _, p := range []string{c.Client, c.Frontend, c.Network, c.Backend, c.Policy, c.Kind} {
		parts = append(parts, cmp.Or(p, "*"))
	}
	return strings.Join(parts, " ")
}

// Matches reports whether the cell is one of the pattern's.
func (c Cell) Matches(pattern Cell) bool {
	is := func(value, want string) bool { return want == "" || value == want }
	return is(c.Client, pattern.Client) && is(c.Frontend, pattern.Frontend) && strings.Contains(c.Network, pattern.Network) &&
		is(c.Backend, pattern.Backend) && is(c.Policy, pattern.Policy) && is(c.Kind, pattern.Kind)
}

func (c Cell) protocol() string { return c.Network[:3] }
func (c Cell) family() Family   { return Family(c.Network[3:]) }

// outside reports whether the client is not on the node under test.
func (c Cell) outside() bool {
	return c.Client != FromPod && c.Client != FromHost && c.Client != FromVM
}

// Cells are those of a profile, in order. Clients outside do not use ClusterIPs, to which
// networks have no routes.
func (p *Profile) Cells() (list []Cell) {
	for _, client := range p.clients() {
		for _, frontend := range []string{ClusterIP, NodePort, ExternalIP, LoadBalancer} {
			for _, protocol := range []string{"tcp", "udp"} {
				for _, family := range p.families() {
					c := Cell{Client: client, Frontend: frontend, Network: protocol + string(family)}
					if c.outside() && frontend == ClusterIP {
						continue
					}
					list = append(list, c.plays()...)
					list = append(list, p.scenes(c)...)
				}
			}
		}
	}
	return list
}

// plays are the kinds, endpoints and policies of a cell that has none. What costs most is
// played with one frontend for each client.
func (c Cell) plays() (list []Cell) {
	usual := c.Frontend == ClusterIP || c.outside() && c.Frontend == NodePort
	for _, c.Backend = range []string{Here, There} {
		for _, c.Policy = range []string{Cluster, Local} {
			c.Kind = Request
			list = append(list, c)
		}
		if usual {
			c.Policy, c.Kind = Cluster, Transfer
			list = append(list, c)
		}
	}
	if usual {
		c.Backend, c.Policy, c.Kind = Both, Cluster, Life
		list = append(list, c)
	}
	return list
}

// scenes are further kinds that some profiles have.
func (p *Profile) scenes(c Cell) (list []Cell) {
	c.Backend, c.Policy = There, Cluster
	if !c.outside() || c.Frontend != NodePort {
		return nil
	}
	if c.Kind = Crowd; p.Crowd > 0 {
		list = append(list, c)
	}
	if c.Kind = Gap; p.Gap.Each != "" {
		list = append(list, c)
	}
	return list
}

// wants returns which pods may answer a request; none if there must be no answer. Under policy
// Local, the Service of Here has an endpoint on the other node as well.
func (c Cell) wants() []string {
	switch {
	case c.Policy == Cluster:
		return []string{c.Backend}
	case !c.outside() && c.Frontend != ClusterIP:
		// Clients of the node take a short cut: externalTrafficPolicy is not for them.
		if c.Backend == Here {
			return []string{Here, There}
		}
		return []string{There}
	case c.Backend == Here:
		return []string{Here}
	}
	return nil
}

// Family is an IP family.
type Family string

// Families.
const (
	IPv4 Family = "4"
	IPv6 Family = "6"
)

// Exception is a number of cells, and why they are one.
type Exception struct {
	Cells Cell
	Why   string
}

// matching returns the first exception for a cell.
func matching(list []Exception, c Cell) *Exception {
	i := slices.IndexFunc(list, func(e Exception) bool { return c.Matches(e.Cells) })
	if i < 0 {
		return nil
	}
	return &list[i]
}

// unused are the exceptions that match none of the cells.
func unused(list []Exception, cells []Cell) (none []Exception) {
	for _, e := range list {
		if !slices.ContainsFunc(cells, func(c Cell) bool { return c.Matches(e.Cells) }) {
			none = append(none, e)
		}
	}
	return none
}

func (e Exception) String() string { return fmt.Sprintf("%s: %s", e.Cells, e.Why) }
