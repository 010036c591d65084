// SPDX-License-Identifier: Apache-2.0

// Package shadow compares what the running proxy of a node chose for new connections with the
// decision table. It changes nothing: the caller tells it of connections and of decisions.
package shadow

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
)

// Connection is a new connection, or the first datagram of a UDP flow, as the kernel recorded it.
type Connection struct {
	Protocol proxier.Protocol
	// Client dialed an address. Backend is what the connection was translated to, or the dialed
	// address itself. Seen is the client as the backend sees it; the zero value if unknown.
	Client, Dialed, Backend, Seen netip.AddrPort
	// Device is the one by which packets of the client come in, if pods are known by devices.
	Device string
}

// Kind says in what a connection disagrees with the decision.
type Kind string

// The kinds.
const (
	// WrongBackend: the endpoint is not among those that are eligible.
	WrongBackend Kind = "wrong-backend"
	// NotTranslated: the connection passed with the address of the Service.
	NotTranslated Kind = "not-translated"
	// NotRefused: the connection should have been rejected or dropped.
	NotRefused Kind = "not-refused"
	// UnknownService: the connection was translated like one to a Service, but there is none
	// with this address and port.
	UnknownService Kind = "unknown-service"
	// Masqueraded: the endpoint should see the client's address, and does not.
	Masqueraded Kind = "masqueraded"
	// NotMasqueraded: the endpoint sees the client's address, and should not.
	NotMasqueraded Kind = "not-masqueraded"
	// AffinityLost: a client got another endpoint than before within the timeout of session affinity,
	// and both are eligible.
	AffinityLost Kind = "affinity-lost"
)

// Disagreement is what is wrong with a connection.
type Disagreement struct {
	Kind Kind
	Text string
}

// verdict on a connection.
type verdict struct {
	// service says that it is a connection to a Service, and other that something else
	// translated it.
	service, other bool
	wrong          *Disagreement // nil if it agrees
}

func disagree(kind Kind, format string, args ...any) verdict {
	return verdict{service: true, wrong: &Disagreement{kind, fmt.Sprintf(format, args...)}}
}

// judge compares a connection with what is decided now.
func judge(c *Connection, e *proxier.Explanation, nodePorts Range) verdict {
	if e.Decision == nil {
		return judgeUnknown(c, e, nodePorts)
	}
	return judgeBy(c, e.Decision, e.Frontend, e.Origin, &e.Facts)
}

// Range is a range of ports.
type Range struct{ First, Last uint16 }

// judgeUnknown is for destinations that are no frontend. Translations of hostPorts and of
// redirections are not about Services.
func judgeUnknown(c *Connection, e *proxier.Explanation, nodePorts Range) verdict {
	to := c.Dialed
	switch translated := c.Backend != c.Dialed; {
	case !translated && e.Outcome == proxier.Rejected:
		return disagree(NotRefused, "passed untranslated, but is to be rejected: %s", e.Reason)
	case !translated:
		return verdict{}
	case slices.ContainsFunc(e.Facts.ServiceCIDRs, func(p netip.Prefix) bool { return p.Contains(to.Addr()) }):
		return disagree(UnknownService, "was translated to %s, but no Service has port %d of this ClusterIP", c.Backend, to.Port())
	case isLocal(&e.Facts, to.Addr()) && to.Port() >= nodePorts.First && to.Port() <= nodePorts.Last:
		return disagree(UnknownService, "was translated to %s, but no Service has NodePort %d", c.Backend, to.Port())
	}
	return verdict{other: true}
}

// judgeBy compares a connection with a decision.
func judgeBy(c *Connection, d *proxier.Decision, f *proxier.Frontend, origin proxier.Origin, facts *proxier.Facts) verdict {
	route, translated := f.Routes[origin], c.Backend != c.Dialed
	to := "passed untranslated"
	if translated {
		to = "was translated to " + c.Backend.String()
	}
	// What this host sends to itself is recorded before it comes in, where rules may refuse it.
	unknown := !translated && isLocal(facts, c.Client.Addr()) && isLocal(facts, c.Dialed.Addr())
	switch {
	case unknown && (!f.Admits(c.Client.Addr()) || d.Size(route.Set) == 0):
		return verdict{}
	case !f.Admits(c.Client.Addr()):
		return disagree(NotRefused, "%s, but is to be dropped: loadBalancerSourceRanges do not admit the source", to)
	case d.Size(route.Set) == 0:
		return disagree(NotRefused, "%s, but is to be refused (%s): no endpoint is eligible", to, d.Empty[route.Set])
	case !translated:
		// A frontend can be its own backend.
		if !eligible(d, route.Set, c.Backend) {
			return disagree(NotTranslated, "passed untranslated, but %d endpoints are eligible", d.Size(route.Set))
		}
	case !eligible(d, route.Set, c.Backend):
		return disagree(WrongBackend, "was translated to %s, which is not eligible", c.Backend)
	}
	return verdict{service: true, wrong: judgeSource(c, route.Source, origin, facts)}
}

func eligible(d *proxier.Decision, set proxier.Set, backend netip.AddrPort) bool {
	return slices.ContainsFunc(d.Backends, func(b proxier.Backend) bool { return b.Addr == backend && b.In(set) })
}

// judgeSource compares the address that the backend sees.
func judgeSource(c *Connection, want proxier.Source, origin proxier.Origin, facts *proxier.Facts) *Disagreement {
	client, seen := c.Client.Addr(), c.Seen.Addr()
	hidden := seen != client
	switch {
	case !seen.IsValid(), c.Backend.Addr() == client, want == proxier.AnySource:
		return nil
	case want == proxier.Masquerade && !hidden:
		// Masquerading can lead to the address that this host used anyway, and nothing that
		// this host receives passes the hook that masquerades.
		if origin == proxier.FromHost || isLocal(facts, c.Backend.Addr()) {
			return nil
		}
		return &Disagreement{NotMasqueraded, fmt.Sprintf("endpoint %s sees the client's address, and is to see this node's", c.Backend)}
	case want == proxier.KeepSource && hidden:
		// CNIs masquerade pods that leave their range, and what the host sends to pods.
		inRange := facts.Pods.Interface == "" && facts.Pods.Local(c.Backend.Addr(), "")
		if origin == proxier.FromHost || origin == proxier.FromPod && !inRange || !facts.Pods.Knows(proxier.FamilyOf(client)) {
			return nil
		}
		return &Disagreement{Masqueraded, fmt.Sprintf("endpoint %s sees %s, and is to see the client's address", c.Backend, seen)}
	}
	return nil
}

func isLocal(facts *proxier.Facts, a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(facts.LocalAddrs, a, netip.Addr.Compare)
	return found || a.IsLoopback()
}
