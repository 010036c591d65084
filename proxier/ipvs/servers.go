// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ipvs/vserver"
)

// claim is what a service port wants of a virtual server.
type claim struct {
	server
	// nodePort gives way to a frontend with exactly that address.
	nodePort bool
	to       []target
}

// claimed is a virtual server that a service port wants.
type claimed struct {
	key serverKey
	*claim
}

// target is a destination as it should be: with a weight, or with 0 to keep the clients it has.
type target struct {
	addr   netip.AddrPort
	weight int
}

// servers are the virtual servers that are wanted, and those that are there.
type servers struct {
	kernel vserver.Kernel
	opts   *Options
	// keeps says that flows of every protocol are waited for, not connections of TCP alone.
	keeps  bool
	claims map[serverKey][]*claim // the newest last
	there  map[serverKey]*serverThere
	// missing are schedulers that the kernel does not have.
	missing map[string]struct{}
	// going are virtual servers that exist, but are not desired. changed are those whose owner
	// has changed.
	going, changed map[serverKey]struct{}
}

type serverThere struct {
	server
	unsure bool // whether it is there: a message about it has failed
	to     map[netip.AddrPort]*destinationThere
	active int       // connections, when it was read last
	until  time.Time // when it goes at the latest; zero if it is not draining
}

type destinationThere struct {
	weight int       // unsure if a message about it has failed
	until  time.Time // as above
	idle   bool      // it had no weight and no connection when it was read last
}

const unsure = -1

func newServers(kernel vserver.Kernel, opts *Options) *servers {
	return &servers{
		kernel: kernel, opts: opts, claims: map[serverKey][]*claim{}, there: map[serverKey]*serverThere{},
		going: map[serverKey]struct{}{}, changed: map[serverKey]struct{}{}, missing: map[string]struct{}{},
	}
}

// read compares with the kernel. Draining destinations continue to drain.
func (s *servers) read() error {
	list, err := s.kernel.List()
	if err != nil {
		return fmt.Errorf("list virtual servers: %w", err)
	}
	before := s.there
	s.there = make(map[serverKey]*serverThere, len(list))
	clear(s.going)
	for k, is := range list {
		old := before[k]
		if old == nil && len(s.claims[k]) == 0 && s.opts.excludes(k.Addr.Addr()) {
			continue
		}
		if err := s.readOne(k, is, old); err != nil {
			s.there = before
			return err
		}
	}
	return nil
}

func (s *servers) readOne(k serverKey, is server, old *serverThere) error {
	to, err := s.kernel.Destinations(k)
	if err != nil {
		return fmt.Errorf("list destinations of %s: %w", k, err)
	}
	t := &serverThere{server: is, to: make(map[netip.AddrPort]*destinationThere, len(to))}
	for addr, d := range to {
		t.active += open(k, d)
		t.to[addr] = &destinationThere{weight: d.Weight, idle: d.Weight == 0 && d.Active+d.Inactive == 0}
		if old != nil && old.to[addr] != nil {
			t.to[addr].until = old.to[addr].until
		}
	}
	if old != nil {
		t.until = old.until
	}
	s.there[k] = t
	if len(s.claims[k]) == 0 {
		s.going[k] = struct{}{}
	}
	return nil
}

// claim counts what a service port wants in.
func (s *servers) claim(list []claimed) {
	for _, c := range list {
		s.claims[c.key] = append(s.claims[c.key], c.claim)
		delete(s.going, c.key)
	}
}

// release counts it out.
func (s *servers) release(list []claimed) {
	for _, c := range list {
		k := c.key
		s.claims[k] = slices.DeleteFunc(s.claims[k], func(o *claim) bool { return o == c.claim })
		if len(s.claims[k]) > 0 {
			s.changed[k] = struct{}{}
			continue
		}
		delete(s.claims, k)
		if s.there[k] != nil {
			s.going[k] = struct{}{}
		}
	}
}

// wanted is the claim that counts.
func (s *servers) wanted(k serverKey) *claim {
	var best *claim
	for _, c := range s.claims[k] {
		if best == nil || !c.nodePort || best.nodePort {
			best = c
		}
	}
	return best
}

// ensure writes what differs of one virtual server: destinations that get new clients
// before those that get no more.
func (s *servers) ensure(ctx context.Context, k serverKey) error {
	err := s.write(ctx, k)
	if errors.Is(err, unix.ESRCH) && s.there[k] != nil {
		s.there[k].unsure = true // another program deleted it
	}
	if err != nil {
		return fmt.Errorf("write virtual server %s: %w", k, err)
	}
	delete(s.changed, k)
	return nil
}

// ensureChanged writes those whose claim is another one.
func (s *servers) ensureChanged(ctx context.Context) error {
	var errs []error
	for k := range s.changed {
		if s.wanted(k) == nil {
			delete(s.changed, k)
			continue
		}
		errs = append(errs, s.ensure(ctx, k))
	}
	return errors.Join(errs...)
}

func (s *servers) write(ctx context.Context, k serverKey) error {
	want, is := s.wanted(k), s.there[k]
	switch {
	case want == nil:
		return nil
	case is == nil || is.unsure:
		if is == nil {
			is = &serverThere{to: make(map[netip.AddrPort]*destinationThere, len(want.to)), unsure: true}
			s.there[k] = is
		}
		for _, d := range is.to {
			d.weight, d.idle = unsure, false
		}
		if err := s.schedule(ctx, k, want.server, s.kernel.Add); err != nil {
			return err
		}
		is.server, is.unsure = want.server, false
	case is.server != want.server:
		is.server = server{} // not known, if this fails
		if err := s.schedule(ctx, k, want.server, s.kernel.Change); err != nil {
			return err
		}
		is.server = want.server
	}
	is.until = time.Time{}
	wanted := make(map[netip.AddrPort]struct{}, len(want.to))
	for _, t := range want.to {
		wanted[t.addr] = struct{}{}
		if t.weight > 0 {
			if err := s.target(k, is, t); err != nil {
				return err
			}
		}
	}
	for _, t := range want.to {
		if t.weight == 0 && is.to[t.addr] != nil { // else no client has it
			if err := s.target(k, is, t); err != nil {
				return err
			}
		}
	}
	for addr, d := range is.to {
		if _, ok := wanted[addr]; ok {
			continue
		}
		if err := s.retire(k, addr, d); err != nil {
			return err
		}
	}
	return nil
}

// schedule adds or changes a virtual server. Where the kernel lacks the scheduler that weights or Maglev need, it
// gets the configured one.
func (s *servers) schedule(ctx context.Context, k serverKey, is server, write func(serverKey, server) error) error {
	err := write(k, is)
	if plain := s.opts.scheduler(); errors.Is(err, unix.ENOENT) && is.Scheduler != plain {
		if _, known := s.missing[is.Scheduler]; !known {
			s.missing[is.Scheduler] = struct{}{}
			klog.FromContext(ctx).Error(err, "IPVS scheduler not available; using the configured one, without weights or Maglev",
				"server", k, "module", "ip_vs_"+is.Scheduler, "instead", plain)
		}
		return write(k, scheduled(is, plain))
	}
	return err
}

// target writes a destination that is wanted.
func (s *servers) target(k serverKey, is *serverThere, t target) error {
	d := is.to[t.addr]
	if d == nil || d.weight == unsure {
		d = &destinationThere{weight: unsure}
		is.to[t.addr] = d
		if err := s.kernel.AddDestination(k, t.addr, t.weight); err != nil {
			return fmt.Errorf("add destination %s: %w", t.addr, err)
		}
		d.weight = t.weight
	}
	d.until = time.Time{}
	return s.weigh(k, t.addr, d, t.weight)
}

func (s *servers) weigh(k serverKey, addr netip.AddrPort, d *destinationThere, weight int) error {
	if d.weight == weight {
		return nil
	}
	d.weight, d.idle = unsure, false
	if err := s.kernel.ChangeDestination(k, addr, weight); err != nil {
		return fmt.Errorf("change destination %s: %w", addr, err)
	}
	d.weight = weight
	return nil
}

// retire makes a destination accept no new connections, and removes it when it has none any
// more. Only TCP destinations drain: UDP flows must get another destination at once, and
// SCTP associations can continue over other paths.
func (s *servers) retire(k serverKey, addr netip.AddrPort, d *destinationThere) error {
	now := s.opts.Clock.Now()
	if d.until.IsZero() {
		d.until = now.Add(s.opts.drain())
	}
	if k.Protocol == proxier.TCP && !d.idle && now.Before(d.until) {
		err := s.weigh(k, addr, d, 0)
		if errors.Is(err, unix.ESRCH) {
			delete(s.there[k].to, addr) // it was never there
			return nil
		}
		return err
	}
	d.weight = unsure
	if err := s.kernel.DeleteDestination(k, addr); err != nil {
		return fmt.Errorf("delete destination %s: %w", addr, err)
	}
	delete(s.there[k].to, addr)
	return nil
}

// removeUnused deletes virtual servers that are not desired and have no open connections.
func (s *servers) removeUnused() error {
	var errs []error
	for k := range s.going {
		drains, err := s.drains(k)
		if err == nil && !drains {
			s.there[k].unsure = true
			if err = s.kernel.Delete(k); err == nil {
				delete(s.there, k)
				delete(s.going, k)
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("delete virtual server %s: %w", k, err))
		}
	}
	return errors.Join(errs...)
}

// drains reports whether a virtual server stays for its connections. That they have gone is
// seen with full syncs.
func (s *servers) drains(k serverKey) (bool, error) {
	is := s.there[k]
	if k.Protocol != proxier.TCP && !s.keeps {
		return false, nil
	}
	if is.until.IsZero() || is.unsure {
		to, err := s.kernel.Destinations(k)
		if err != nil {
			return false, unless(err, unix.ESRCH)
		}
		is.active = 0
		for addr, d := range to {
			is.active += open(k, d)
			if is.to[addr] == nil {
				is.to[addr] = &destinationThere{weight: d.Weight}
			}
		}
		if is.until.IsZero() {
			is.until = s.opts.Clock.Now().Add(s.opts.drain())
		}
	}
	if is.active == 0 || !s.opts.Clock.Now().Before(is.until) {
		return false, nil
	}
	for addr, d := range is.to {
		if err := s.weigh(k, addr, d, 0); unless(err, unix.ESRCH) != nil {
			return true, err
		}
	}
	return true, nil
}

// open returns the number of open connections. The kernel never counts UDP flows as active.
func open(k serverKey, d destination) int {
	if k.Protocol == proxier.TCP {
		return d.Active
	}
	return d.Active + d.Inactive
}

// draining are the addresses of those that stay for their connections.
func (s *servers) draining() map[netip.Addr]struct{} {
	list := map[netip.Addr]struct{}{}
	for k := range s.going {
		list[k.Addr.Addr()] = struct{}{}
	}
	return list
}
