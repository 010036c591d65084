// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// fakeKernel holds what a kernel does, and takes and refuses what it does.
type fakeKernel struct {
	servers map[serverKey]*fakeServer
	addrs   map[netip.Addr]struct{}
	members map[member]struct{}

	messages, lists int
	// fails says whether a message does not arrive, or its answer does not. As the order of
	// messages is not always the same, it goes by what it says.
	fails func(what string) (before, after error)
	// gone is called after everything that takes something away, and cut when that cuts
	// off connections.
	gone func()
	cut  func(serverKey, netip.AddrPort, *destination)
	// weighed is told of weights.
	weighed func(serverKey, netip.AddrPort, int)
}

type fakeServer struct {
	server
	to map[netip.AddrPort]*destination
}

func newFakeKernel() *fakeKernel {
	return &fakeKernel{servers: map[serverKey]*fakeServer{}, addrs: map[netip.Addr]struct{}{}, members: map[member]struct{}{}}
}

func (k *fakeKernel) message(do func() error, what ...any) error {
	k.messages++
	var before, after error
	if k.fails != nil {
		before, after = k.fails(fmt.Sprint(what...))
	}
	if before != nil {
		return before
	}
	if err := do(); err != nil {
		return err
	}
	return after
}

func (k *fakeKernel) removed() {
	if k.gone != nil {
		k.gone()
	}
}

func (k *fakeKernel) cuts(key serverKey, to netip.AddrPort, d *destination) {
	if k.cut != nil && d.active > 0 && key.protocol == proxier.TCP {
		k.cut(key, to, d)
	}
}

type fakeServers struct{ *fakeKernel }

func (k fakeServers) List() (list map[serverKey]server, err error) {
	k.lists++
	return list, k.message(func() error {
		list = map[serverKey]server{}
		for key, s := range k.servers {
			list[key] = s.server
		}
		return nil
	}, "list servers")
}

func (k fakeServers) Destinations(key serverKey) (list map[netip.AddrPort]destination, err error) {
	k.lists++
	return list, k.at(key, func(s *fakeServer) error {
		list = map[netip.AddrPort]destination{}
		for a, d := range s.to {
			list[a] = *d
		}
		return nil
	}, "list")
}

func (k fakeServers) at(key serverKey, do func(*fakeServer) error, what ...any) error {
	return k.message(func() error {
		s := k.servers[key]
		if s == nil {
			return unix.ESRCH
		}
		return do(s)
	}, append(what, key)...)
}

func (k fakeServers) Add(key serverKey, is server) error {
	return k.message(func() error {
		if k.servers[key] == nil {
			k.servers[key] = &fakeServer{to: map[netip.AddrPort]*destination{}}
		}
		k.servers[key].server = is
		return nil
	}, "add", key)
}

func (k fakeServers) Change(key serverKey, is server) error {
	return k.at(key, func(s *fakeServer) error {
		s.server = is
		return nil
	}, "change")
}

func (k fakeServers) Delete(key serverKey) error {
	defer k.removed()
	return k.message(func() error {
		if s := k.servers[key]; s != nil {
			for to, d := range s.to {
				k.cuts(key, to, d)
			}
		}
		delete(k.servers, key)
		return nil
	}, "delete", key)
}

func (k fakeServers) AddDestination(key serverKey, to netip.AddrPort, weight int) error {
	return k.at(key, func(s *fakeServer) error {
		if s.to[to] == nil {
			s.to[to] = &destination{}
		}
		s.to[to].weight = weight
		if k.weighed != nil {
			k.weighed(key, to, weight)
		}
		return nil
	}, "add", to, weight)
}

func (k fakeServers) ChangeDestination(key serverKey, to netip.AddrPort, weight int) error {
	defer k.removed()
	return k.at(key, func(s *fakeServer) error {
		if s.to[to] == nil {
			return unix.ESRCH
		}
		s.to[to].weight = weight
		if k.weighed != nil {
			k.weighed(key, to, weight)
		}
		return nil
	}, "change", to, weight)
}

func (k fakeServers) DeleteDestination(key serverKey, to netip.AddrPort) error {
	defer k.removed()
	return k.message(func() error {
		if s := k.servers[key]; s != nil && s.to[to] != nil {
			k.cuts(key, to, s.to[to])
			delete(s.to, to)
		}
		return nil
	}, "delete", key, to)
}

// fakeObjects are addresses, or members of sets.
type fakeObjects[K comparable] struct {
	*fakeKernel
	there map[K]struct{}
}

func (o fakeObjects[K]) List() (list []K, err error) {
	o.lists++
	return list, o.message(func() error {
		list = slices.Collect(maps.Keys(o.there))
		return nil
	}, "list objects")
}

func (o fakeObjects[K]) Add(k K) error {
	return o.message(func() error {
		o.there[k] = struct{}{}
		return nil
	}, "add", k)
}

func (o fakeObjects[K]) Delete(k K) error {
	defer o.removed()
	return o.message(func() error {
		delete(o.there, k)
		return nil
	}, "delete", k)
}

// fakeRules are rules that do what decisions say.
type fakeRules struct {
	kernel *fakeKernel
	there  map[uint32]*proxier.Decision
	node   *proxier.NodeRules
	syncs  int
}

func (r *fakeRules) Sync(_ context.Context, u proxier.Update) error {
	r.syncs++
	if u.NodeRules != nil {
		r.node = u.NodeRules
	}
	if u.Full {
		clear(r.there)
	}
	for _, c := range u.Changes {
		if c.New == nil {
			delete(r.there, c.Index())
			continue
		}
		r.there[c.Index()] = c.New
	}
	r.kernel.removed()
	return r.kernel.message(func() error { return nil }, "rules") // what is owed comes of itself
}

func (r *fakeRules) Cleanup(context.Context) error {
	clear(r.there)
	return nil
}
func (r *fakeRules) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }
func (r *fakeRules) Usable(proxier.Family) error                         { return nil }
func (r *fakeRules) Close() error                                        { return nil }

// fakeSystem is that of a kernel that has everything.
type fakeSystem struct{ rules *fakeRules }

func (fakeSystem) prepare(context.Context) error { return nil }
func (fakeSystem) links() ([]netip.Prefix, error) {
	return []netip.Prefix{netip.MustParsePrefix("172.18.0.0/16"), netip.MustParsePrefix("fd00:18::/64")}, nil
}
func (s fakeSystem) serving(context.Context) (bool, error) { return len(s.rules.there) > 0, nil }
func (fakeSystem) cleanup(context.Context) error           { return nil }
func (fakeSystem) close() error                            { return nil }

// process is a tier that begins on a kernel.
func (k *fakeKernel) process(opts Options, rules *fakeRules) *Tier {
	t := newTier(opts)
	t.rules = rules
	t.servers, t.addrs, t.members = newServers(fakeServers{k}, t.opts), newCounted[netip.Addr](nil), newCounted[member](nil)
	t.use(fakeSystem{rules}, fakeServers{k}, fakeObjects[netip.Addr]{k, k.addrs}, fakeObjects[member]{k, k.members})
	return t
}

func newFakeRules(k *fakeKernel) *fakeRules {
	return &fakeRules{kernel: k, there: map[uint32]*proxier.Decision{}}
}
