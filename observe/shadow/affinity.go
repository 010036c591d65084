// SPDX-License-Identifier: Apache-2.0

package shadow

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

const (
	// maxStays is how many clients of Services with affinity are remembered.
	maxStays = 1 << 16
	// affinitySlack is by how much less than the timeout two connections have to be apart: those of IPVS
	// are known up to two seconds late.
	affinitySlack = 3 * time.Second
	// affinityRace is how long after the first connection of a client another one may have been
	// under way, of which the running proxy did not know where the first one would lead.
	affinityRace = 100 * time.Millisecond
)

// stayKey is a client of one frontend. All frontends of a service port share what Tandem remembers of
// a client; the running proxy may be one that remembers it for each frontend, as IPVS does.
type stayKey struct {
	client netip.Addr
	dialed netip.AddrPort
}

// stay is the endpoint that a client got last.
type stay struct {
	backend     netip.AddrPort
	set         proxier.Set // that it was chosen from
	first, last time.Time
	raced       bool
}

// judgeAffinity compares a connection that agrees with the decision otherwise with the previous one of
// the same client. It returns the endpoint of that one if it should have got this one too.
func (s *Shadow) judgeAffinity(c *Connection, e *proxier.Explanation) (before netip.AddrPort, wrong *Disagreement) {
	d, now := e.Decision, s.opts.Now()
	set := e.Frontend.Routes[e.Origin].Set
	if d.Affinity == 0 || !eligible(d, set, c.Backend) {
		return before, nil
	}
	stays := s.stays[d.Name]
	if stays == nil {
		stays = map[stayKey]*stay{}
		s.stays[d.Name] = stays
	}
	key := stayKey{c.Client.Addr(), c.Dialed}
	known := stays[key]
	switch {
	case known == nil || now.Sub(known.last) >= d.Affinity:
		if known == nil && s.countStays() >= maxStays {
			return before, nil
		}
		stays[key] = &stay{backend: c.Backend, set: set, first: now, last: now}
		return before, nil
	case known.backend == c.Backend:
	case now.Sub(known.first) < affinityRace:
		known.raced = true
	case known.raced:
		known.raced = false
	case now.Sub(known.last) < d.Affinity-affinitySlack && eligible(d, set, known.backend):
		before = known.backend
		wrong = &Disagreement{AffinityLost, fmt.Sprintf("was translated to %s, but session affinity (%s) keeps this client at %s, which is still eligible",
			c.Backend, d.Affinity, before)}
	}
	known.backend, known.set, known.last = c.Backend, set, now
	return before, wrong
}

func (s *Shadow) countStays() (n int) {
	for _, stays := range s.stays {
		n += len(stays)
	}
	return n
}

// forgetStays forgets where clients are that a change may lead elsewhere.
func (s *Shadow) forgetStays(name proxier.ServicePortName, was, is *proxier.Decision) {
	if is == nil || was != nil && was.Affinity != is.Affinity {
		delete(s.stays, name)
		return
	}
	for key, known := range s.stays[name] {
		if !eligible(is, known.set, known.backend) {
			delete(s.stays[name], key)
		}
	}
}

// expireStays forgets clients that are too long ago.
func (s *Shadow) expireStays(now time.Time) {
	const longest = 24 * time.Hour // that a Service can have
	for name, stays := range s.stays {
		for key, known := range stays {
			if now.Sub(known.last) > longest {
				delete(stays, key)
			}
		}
		if len(stays) == 0 {
			delete(s.stays, name)
		}
	}
}

// mayLeave reports whether a client could get another endpoint than before around a connection: the
// previous one was not eligible at some moment, or there was no affinity.
func (s *Shadow) mayLeave(p *pending, e *proxier.Explanation) bool {
	stayed := func(d *proxier.Decision) bool {
		f := frontendFor(d, &p.connection)
		return f != nil && d.Affinity > 0 && eligible(d, f.Routes[e.Origin].Set, p.before)
	}
	if !stayed(e.Decision) {
		return true
	}
	for i := range s.past {
		change := &s.past[i]
		if change.until.Before(p.at.Add(-s.opts.Settle)) || change.name() != e.Decision.Name {
			continue
		}
		if !stayed(change.old) || !stayed(change.new) {
			return true
		}
	}
	return false
}
