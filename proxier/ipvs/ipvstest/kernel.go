// SPDX-License-Identifier: Apache-2.0

// Package ipvstest has a kernel's virtual servers, addresses and set members, and the rules
// beside them, that behave like the real ones: for tests of mode ipvs without a kernel.
package ipvstest

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ipvs/vserver"
)

// Kernel holds what a kernel does, and accepts and refuses what it does. M are the members
// of sets.
type Kernel[M comparable] struct {
	Servers map[vserver.Key]*Server
	Addrs   map[netip.Addr]struct{}
	Members map[M]struct{}

	// Lacks are schedulers that the kernel does not have.
	Lacks map[string]bool
	// Messages and Lists count calls.
	Messages, Lists int
	// Fails reports whether a message does not arrive, or its answer does not. As the order of
	// messages is not always the same, it goes by their text.
	Fails func(what string) (before, after error)
	// Gone is called after everything that takes something away, and Cut when that cuts
	// off connections.
	Gone func()
	Cut  func(vserver.Key, netip.AddrPort, *vserver.Destination)
	// Weighed is called with every weight that is set.
	Weighed func(vserver.Key, netip.AddrPort, int)
}

// Server is a virtual server with its destinations.
type Server struct {
	vserver.Server
	To map[netip.AddrPort]*vserver.Destination
}

// NewKernel is an empty one.
func NewKernel[M comparable]() *Kernel[M] {
	return &Kernel[M]{Servers: map[vserver.Key]*Server{}, Addrs: map[netip.Addr]struct{}{}, Members: map[M]struct{}{}}
}

func (k *Kernel[M]) message(do func() error, what ...any) error {
	k.Messages++
	var before, after error
	if k.Fails != nil {
		before, after = k.Fails(fmt.Sprint(what...))
	}
	if before != nil {
		return before
	}
	if err := do(); err != nil {
		return err
	}
	return after
}

func (k *Kernel[M]) removed() {
	if k.Gone != nil {
		k.Gone()
	}
}

func (k *Kernel[M]) cuts(key vserver.Key, to netip.AddrPort, d *vserver.Destination) {
	if k.Cut != nil && d.Active > 0 && key.Protocol == proxier.TCP {
		k.Cut(key, to, d)
	}
}

// Servers are the virtual servers of a kernel.
type Servers[M comparable] struct{ *Kernel[M] }

// List implements vserver.Kernel.
func (k Servers[M]) List() (list map[vserver.Key]vserver.Server, err error) {
	k.Lists++
	return list, k.message(func() error {
		list = map[vserver.Key]vserver.Server{}
		for key, s := range k.Kernel.Servers {
			list[key] = s.Server
		}
		return nil
	}, "list servers")
}

// Destinations implements vserver.Kernel.
func (k Servers[M]) Destinations(key vserver.Key) (list map[netip.AddrPort]vserver.Destination, err error) {
	k.Lists++
	return list, k.at(key, func(s *Server) error {
		list = map[netip.AddrPort]vserver.Destination{}
		for a, d := range s.To {
			list[a] = *d
		}
		return nil
	}, "list")
}

func (k Servers[M]) at(key vserver.Key, do func(*Server) error, what ...any) error {
	return k.message(func() error {
		s := k.Kernel.Servers[key]
		if s == nil {
			return unix.ESRCH
		}
		return do(s)
	}, append(what, key)...)
}

// Add implements vserver.Kernel.
func (k Servers[M]) Add(key vserver.Key, is vserver.Server) error {
	return k.message(func() error {
		if k.Lacks[is.Scheduler] {
			return unix.ENOENT
		}
		if k.Kernel.Servers[key] == nil {
			k.Kernel.Servers[key] = &Server{To: map[netip.AddrPort]*vserver.Destination{}}
		}
		k.Kernel.Servers[key].Server = is
		return nil
	}, "add", key)
}

// Change implements vserver.Kernel.
func (k Servers[M]) Change(key vserver.Key, is vserver.Server) error {
	return k.at(key, func(s *Server) error {
		if k.Lacks[is.Scheduler] {
			return unix.ENOENT
		}
		s.Server = is
		return nil
	}, "change")
}

// Delete implements vserver.Kernel.
func (k Servers[M]) Delete(key vserver.Key) error {
	defer k.removed()
	return k.message(func() error {
		if s := k.Kernel.Servers[key]; s != nil {
			for to, d := range s.To {
				k.cuts(key, to, d)
			}
		}
		delete(k.Kernel.Servers, key)
		return nil
	}, "delete", key)
}

// AddDestination implements vserver.Kernel.
func (k Servers[M]) AddDestination(key vserver.Key, to netip.AddrPort, weight int) error {
	return k.at(key, func(s *Server) error {
		if s.To[to] == nil {
			s.To[to] = &vserver.Destination{}
		}
		s.To[to].Weight = weight
		if k.Weighed != nil {
			k.Weighed(key, to, weight)
		}
		return nil
	}, "add", to, weight)
}

// ChangeDestination implements vserver.Kernel.
func (k Servers[M]) ChangeDestination(key vserver.Key, to netip.AddrPort, weight int) error {
	defer k.removed()
	return k.at(key, func(s *Server) error {
		if s.To[to] == nil {
			return unix.ESRCH
		}
		s.To[to].Weight = weight
		if k.Weighed != nil {
			k.Weighed(key, to, weight)
		}
		return nil
	}, "change", to, weight)
}

// DeleteDestination implements vserver.Kernel.
func (k Servers[M]) DeleteDestination(key vserver.Key, to netip.AddrPort) error {
	defer k.removed()
	return k.message(func() error {
		if s := k.Kernel.Servers[key]; s != nil && s.To[to] != nil {
			k.cuts(key, to, s.To[to])
			delete(s.To, to)
		}
		return nil
	}, "delete", key, to)
}

// Objects are addresses, or members of sets, of a kernel.
type Objects[K, M comparable] struct {
	*Kernel[M]
	There map[K]struct{}
}

// List lists them.
func (o Objects[K, M]) List() (list []K, err error) {
	o.Lists++
	return list, o.message(func() error {
		list = slices.Collect(maps.Keys(o.There))
		return nil
	}, "list objects")
}

// Add succeeds if it is there.
func (o Objects[K, M]) Add(k K) error {
	return o.message(func() error {
		o.There[k] = struct{}{}
		return nil
	}, "add", k)
}

// Delete succeeds if it is not there.
func (o Objects[K, M]) Delete(k K) error {
	defer o.removed()
	return o.message(func() error {
		delete(o.There, k)
		return nil
	}, "delete", k)
}
