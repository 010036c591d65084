// SPDX-License-Identifier: Apache-2.0

package shadow

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier"
)

// Limits of what a report shows, and a Shadow keeps.
const (
	examplesPerKind = 3 // of each service port
	maxExamples     = 100
	maxOthers       = 1000
)

// Report is what a Shadow found, as JSON.
type Report struct {
	Node    string    `json:"node"`
	Started time.Time `json:"started"`
	Ended   time.Time `json:"ended"`
	// Connections to Services, and how many of them agree with the decisions and disagree.
	Connections   int `json:"connections"`
	Agreements    int `json:"agreements"`
	Disagreements int `json:"disagreements"`
	// Lost counts how often the kernel could not deliver notifications. Each time, any number
	// of connections was not compared.
	Lost int `json:"lost"`
	// Ports are the service ports, sorted by name.
	Ports []Port `json:"ports"`
	// Examples are the first few disagreements of each kind.
	Examples []Example `json:"examples"`
	// NeverSeen are frontends without a connection in this time.
	NeverSeen []Frontend `json:"neverSeen"`
	// Others are destinations that are no Service, and were translated by something else, such
	// as hostPorts.
	Others []Other `json:"others"`
}

// Port is a service port.
type Port struct {
	Service       string `json:"service"` // namespace/name:port
	Protocol      string `json:"protocol"`
	Connections   int    `json:"connections"`
	Agreements    int    `json:"agreements"`
	Disagreements int    `json:"disagreements"`
	// Kinds counts disagreements.
	Kinds map[Kind]int `json:"kinds,omitempty"`
	// EndpointsSeen are how many of the endpoints got a connection, of both families.
	EndpointsSeen int `json:"endpointsSeen"`
	Endpoints     int `json:"endpoints"`
}

// Example is a connection that disagrees.
type Example struct {
	Kind     Kind           `json:"kind"`
	Text     string         `json:"text"`
	Time     time.Time      `json:"time"`
	Protocol string         `json:"protocol"`
	Client   netip.AddrPort `json:"client"`
	Dialed   netip.AddrPort `json:"dialed"`
	Backend  netip.AddrPort `json:"backend"`
	Seen     string         `json:"seen"`
	// Explanation is what was decided when the connection came.
	Explanation *explain.Explanation `json:"explanation"`
}

// Frontend is an address of a service port.
type Frontend struct {
	Service  string         `json:"service"`
	Protocol string         `json:"protocol"`
	Kind     string         `json:"kind"`
	Address  netip.AddrPort `json:"address"`
}

// Other is a translation that is not about Services.
type Other struct {
	Protocol string         `json:"protocol"`
	Dialed   netip.AddrPort `json:"dialed"`
	Backend  netip.AddrPort `json:"backend"`
	Count    int            `json:"count"`
}

// tally counts.
type tally struct {
	lost     int
	ports    map[proxier.ServicePortName]*count
	unknown  count // no Service
	seen     map[frontendKey]bool
	examples []Example
	others   map[otherKey]int
}

type count struct {
	agreements, disagreements int
	kinds                     map[Kind]int
	backends                  map[netip.AddrPort]bool
	examples                  map[Kind]int
}

type frontendKey struct {
	name proxier.ServicePortName
	addr netip.AddrPort
}

type otherKey struct {
	protocol        proxier.Protocol
	dialed, backend netip.AddrPort
}

func newTally() tally {
	return tally{
		ports: map[proxier.ServicePortName]*count{}, seen: map[frontendKey]bool{}, others: map[otherKey]int{},
	}
}

func (t *tally) of(name *proxier.ServicePortName) *count {
	if name == nil {
		return &t.unknown
	}
	c := t.ports[*name]
	if c == nil {
		c = &count{}
		t.ports[*name] = c
	}
	return c
}

func (t *tally) agree(d *proxier.Decision, f *proxier.Frontend, c *Connection) {
	n := t.of(&d.Name)
	n.agreements++
	if n.backends == nil {
		n.backends = map[netip.AddrPort]bool{}
	}
	n.backends[c.Backend] = true
	t.seen[frontendKey{d.Name, f.Addr}] = true
}

// wantsExample reports whether a disagreement may become an example.
func (t *tally) wantsExample(name *proxier.ServicePortName, kind Kind) bool {
	return len(t.examples) < maxExamples && t.of(name).examples[kind] < examplesPerKind
}

func (t *tally) disagree(p *pending) {
	n, kind := t.of(p.name), p.verdict.wrong.Kind
	n.disagreements++
	if p.name != nil {
		t.seen[frontendKey{*p.name, p.frontend}] = true
	}
	if n.kinds == nil {
		n.kinds, n.examples = map[Kind]int{}, map[Kind]int{}
	}
	n.kinds[kind]++
	if p.explanation == nil || !t.wantsExample(p.name, kind) {
		return
	}
	n.examples[kind]++
	c := &p.connection
	e := Example{
		Kind: kind, Text: p.verdict.wrong.Text, Time: p.at, Protocol: c.Protocol.String(),
		Client: c.Client, Dialed: c.Dialed, Backend: c.Backend, Explanation: p.explanation,
	}
	if c.Seen.IsValid() {
		e.Seen = c.Seen.String()
	}
	t.examples = append(t.examples, e)
}

func (t *tally) otherTranslation(c *Connection) {
	key := otherKey{c.Protocol, c.Dialed, c.Backend}
	if _, known := t.others[key]; known || len(t.others) < maxOthers {
		t.others[key]++
	}
}

// Report returns what was found so far. Connections that disagree and are not settled yet are left
// out.
func (s *Shadow) Report() *Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := &s.tally
	r := &Report{
		Node: s.opts.Node, Started: s.started, Ended: s.opts.Now(), Lost: t.lost,
		Ports: []Port{}, Examples: append([]Example{}, t.examples...), NeverSeen: []Frontend{}, Others: []Other{},
	}
	add := func(p Port, n *count) {
		p.Agreements, p.Disagreements, p.Connections = n.agreements, n.disagreements, n.agreements+n.disagreements
		p.Kinds, p.EndpointsSeen = maps.Clone(n.kinds), len(n.backends)
		r.Agreements, r.Disagreements, r.Connections = r.Agreements+p.Agreements, r.Disagreements+p.Disagreements, r.Connections+p.Connections
		r.Ports = append(r.Ports, p)
	}
	listed := map[proxier.ServicePortName]bool{}
	for _, change := range s.table.All() {
		d := change.New
		listed[d.Name] = true
		p := Port{Service: d.Name.String(), Protocol: d.Name.Protocol.String()}
		for i := range d.Backends {
			if d.Backends[i].Members != 0 {
				p.Endpoints++
			}
		}
		add(p, t.of(&d.Name))
		for i := range d.Frontends {
			if f := &d.Frontends[i]; f.Conflict == nil && !t.seen[frontendKey{d.Name, f.Addr}] {
				r.NeverSeen = append(r.NeverSeen, Frontend{p.Service, p.Protocol, f.Kind.String(), f.Addr})
			}
		}
	}
	for name, n := range t.ports { // Services that are gone
		if !listed[name] && n.agreements+n.disagreements > 0 {
			add(Port{Service: name.String(), Protocol: name.Protocol.String()}, n)
		}
	}
	if t.unknown.disagreements > 0 {
		add(Port{Service: noService}, &t.unknown)
	}
	for key, n := range t.others {
		r.Others = append(r.Others, Other{key.protocol.String(), key.dialed, key.backend, n})
	}
	slices.SortFunc(r.Ports, func(a, b Port) int {
		return cmp.Or(strings.Compare(a.Service, b.Service), strings.Compare(a.Protocol, b.Protocol))
	})
	slices.SortFunc(r.NeverSeen, func(a, b Frontend) int {
		return cmp.Or(strings.Compare(a.Service, b.Service), strings.Compare(a.Protocol, b.Protocol), a.Address.Compare(b.Address))
	})
	slices.SortFunc(r.Others, func(a, b Other) int {
		return cmp.Or(b.Count-a.Count, a.Dialed.Compare(b.Dialed), a.Backend.Compare(b.Backend))
	})
	return r
}

// noService stands for connections to what is no Service.
const noService = "(no Service)"
