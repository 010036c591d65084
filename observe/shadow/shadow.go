// SPDX-License-Identifier: Apache-2.0

package shadow

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier"
)

// Options of a Shadow.
type Options struct {
	// Node is its name.
	Node string
	// Settle is how long the running proxy may take to apply a change, and a change to arrive
	// here. A connection that agrees with what was decided at any moment in this time before
	// or after it is not a disagreement.
	Settle time.Duration
	// NodePorts is the range that NodePorts are allocated from.
	NodePorts Range
	// Now is the clock.
	Now func() time.Time
}

// Shadow collects connections and compares them. It is a proxier.Tier, which programs nothing, to
// know of changes.
type Shadow struct {
	opts  Options
	table *proxier.Table

	mu      sync.Mutex
	started time.Time
	synced  bool
	ports   map[proxier.ServicePortName]bool // all that there are
	past    []past
	pending []pending
	tally   tally
	// known are the connections of IPVS in the last list.
	known map[connectionKey]bool
	// recent are those that conntrack reported since then.
	recent map[connectionKey]bool
	// stays are where clients of Services with affinity are.
	stays map[proxier.ServicePortName]map[stayKey]*stay
}

// past is a decision that was replaced. Without an old decision, the frontends of the new one
// were not served before.
type past struct {
	until    time.Time
	old, new *proxier.Decision
}

func (p *past) name() proxier.ServicePortName {
	if p.new != nil {
		return p.new.Name
	}
	return p.old.Name
}

// pending is a connection that disagrees, so far.
type pending struct {
	at          time.Time
	connection  Connection
	verdict     verdict
	name        *proxier.ServicePortName // nil for no Service
	frontend    netip.AddrPort
	before      netip.AddrPort // the endpoint that affinity leads to
	explanation *explain.Explanation
}

type connectionKey struct {
	protocol       proxier.Protocol
	client, dialed netip.AddrPort
}

// New makes a Shadow.
func New(o Options) *Shadow {
	return &Shadow{
		opts: o, tally: newTally(), ports: map[proxier.ServicePortName]bool{}, known: map[connectionKey]bool{}, recent: map[connectionKey]bool{},
		stays: map[proxier.ServicePortName]map[stayKey]*stay{},
	}
}

// Follow sets the table to compare with. It has to be called before anything else.
func (s *Shadow) Follow(table *proxier.Table) { s.table = table }

// Start says that connections follow. It should be called Settle after all objects are known: what
// the running proxy has not applied until then is not known here.
func (s *Shadow) Start() { s.started = s.opts.Now() }

// Sync implements proxier.Tier: it remembers what was decided before.
func (s *Shadow) Sync(_ context.Context, update proxier.Update) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, first := s.opts.Now(), !s.synced
	s.synced = true
	for _, c := range update.Changes {
		switch {
		case c.New == nil:
			delete(s.ports, c.Old.Name)
		case !s.ports[c.New.Name]:
			s.ports[c.New.Name] = true
			if first {
				continue
			}
		case c.Old == nil:
			continue // unchanged, in a full sync
		}
		p := past{now, c.Old, c.New}
		s.past = append(s.past, p)
		s.forgetStays(p.name(), p.old, p.new)
	}
	return nil
}

// Cleanup implements proxier.Tier.
func (s *Shadow) Cleanup(context.Context) error { return nil }

// Supports implements proxier.Tier.
func (s *Shadow) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

// Observe compares a new connection that conntrack reported.
func (s *Shadow) Observe(c Connection) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := connectionKey{c.Protocol, c.Client, c.Dialed}
	if s.known[key] {
		return // compared as one of IPVS
	}
	if c.Backend != c.Dialed {
		s.recent[key] = true
	}
	s.observe(c)
}

func (s *Shadow) observe(c Connection) {
	e := s.explain(&c)
	v := judge(&c, &e, s.opts.NodePorts)
	var before netip.AddrPort
	if v.service && v.wrong == nil {
		before, v.wrong = s.judgeAffinity(&c, &e)
	}
	switch {
	case v.wrong != nil:
		p := pending{at: s.opts.Now(), connection: c, verdict: v, before: before}
		if e.Decision != nil {
			p.name, p.frontend = &e.Decision.Name, e.Frontend.Addr
		}
		if s.tally.wantsExample(p.name, v.wrong.Kind) {
			p.explanation = explain.Of(s.opts.Node, s.table, s.flow(&c), nil)
		}
		s.pending = append(s.pending, p)
	case v.service:
		s.tally.agree(e.Decision, e.Frontend, &c)
	case v.other:
		s.tally.otherTranslation(&c)
	}
}

// flow is a connection as the table knows it. On a node with IPVS, this host dials a Service from
// the address of the Service, which a device has.
func (s *Shadow) flow(c *Connection) proxier.Flow {
	f := proxier.Flow{Source: c.Client, Destination: c.Dialed, Protocol: c.Protocol, Device: c.Device}
	if c.Client.Addr() == c.Dialed.Addr() {
		if node := s.table.Facts().NodeIPs[proxier.FamilyOf(c.Client.Addr())]; node.IsValid() {
			f.Source = netip.AddrPortFrom(node, c.Client.Port())
		}
	}
	return f
}

func (s *Shadow) explain(c *Connection) proxier.Explanation { return s.table.Explain(s.flow(c)) }

// ObserveIPVS compares the connections of IPVS that were not in the previous list. The first list
// only says which connections are older. Those that conntrack reported are compared once.
func (s *Shadow) ObserveIPVS(list []Connection, first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.known
	s.known = make(map[connectionKey]bool, len(list))
	for i := range list {
		c := &list[i]
		key := connectionKey{c.Protocol, c.Client, c.Dialed}
		s.known[key] = true
		if first || before[key] {
			continue
		}
		// Conntrack saw it too, translated by IPVS only with net.ipv4.vs.conntrack=1.
		at := slices.IndexFunc(s.pending, func(p pending) bool {
			return p.verdict.wrong.Kind == NotTranslated && p.connection.Protocol == c.Protocol && p.connection.Client == c.Client && p.connection.Dialed == c.Dialed
		})
		if at >= 0 {
			s.pending = slices.Delete(s.pending, at, at+1)
			s.observe(*c)
		} else if !s.recent[key] {
			s.observe(*c)
		}
	}
	s.recent = map[connectionKey]bool{}
}

// Lost counts notifications that the kernel could not deliver.
func (s *Shadow) Lost() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tally.lost++
}

// Settled decides about connections that disagreed, and whose time is over. With all set, about
// the others too.
func (s *Shadow) Settled(all bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.opts.Now()
	rest := s.pending[:0]
	for i := range s.pending {
		p := &s.pending[i]
		if !all && now.Sub(p.at) < s.opts.Settle {
			rest = append(rest, *p)
			continue
		}
		s.settle(p)
	}
	clear(s.pending[len(rest):])
	s.pending = rest
	// A pending connection may need what was valid Settle before it, or after.
	s.past = slices.DeleteFunc(s.past, func(p past) bool { return now.Sub(p.until) > 3*s.opts.Settle })
	s.expireStays(now)
}

// settle compares with what is decided now, and with what was decided around the connection.
func (s *Shadow) settle(p *pending) {
	c := &p.connection
	e := s.explain(c)
	if v := judge(c, &e, s.opts.NodePorts); v.wrong == nil {
		if p.before.IsValid() && v.service && !s.mayLeave(p, &e) {
			s.tally.disagree(p)
			return
		}
		if v.service {
			s.tally.agree(e.Decision, e.Frontend, c)
		}
		return
	}
	for i := range s.past {
		if s.past[i].until.Before(p.at.Add(-s.opts.Settle)) {
			continue
		}
		for _, d := range []*proxier.Decision{s.past[i].old, s.past[i].new} {
			f := frontendFor(d, c)
			if f == nil {
				continue
			}
			if judgeBy(c, d, f, e.Origin, &e.Facts).wrong == nil {
				s.tally.agree(d, f, c)
				return
			}
		}
		// It was not a frontend then, and passed.
		if s.past[i].new != nil && frontendFor(s.past[i].new, c) != nil && frontendFor(s.past[i].old, c) == nil && c.Backend == c.Dialed {
			return
		}
	}
	s.tally.disagree(p)
}

// frontendFor finds the frontend of a decision that a connection is for.
func frontendFor(d *proxier.Decision, c *Connection) *proxier.Frontend {
	if d == nil || d.Name.Protocol != c.Protocol {
		return nil
	}
	for i := range d.Frontends {
		f := &d.Frontends[i]
		same := f.Addr == c.Dialed || f.Kind.Wildcard() && f.Addr.Port() == c.Dialed.Port() && f.Addr.Addr().Is4() == c.Dialed.Addr().Is4()
		if same && f.Conflict == nil {
			return f
		}
	}
	return nil
}
