// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"net/netip"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ipvs/vserver"
)

// The objects of the kernel's, by short names.
type (
	serverKey   = vserver.Key
	server      = vserver.Server
	destination = vserver.Destination
)

func keyOf(addr netip.AddrPort, protocol proxier.Protocol) serverKey {
	return serverKey{Addr: addr, Protocol: protocol}
}

// Flags of a virtual server (linux/ip_vs.h).
const (
	flagPersistent = 0x1
	flagHashed     = 0x2 // the kernel's own
	// Schedulers that hash, mh and sh, take another destination where the one they found
	// is not to have new clients, and go by the client's port as well.
	flagHashFallback = 0x8
	flagHashPort     = 0x10
)

// weightedSchedulers are those that go by weights, where others do not.
var weightedSchedulers = map[string]string{"rr": "wrr", "lc": "wlc"}

// scheduled is a virtual server with another scheduler.
func scheduled(s server, scheduler string) server {
	s.Scheduler = scheduler
	s.Flags &^= flagHashPort | flagHashFallback
	switch scheduler {
	case "mh":
		s.Flags |= flagHashPort | flagHashFallback
	case "sh":
		s.Flags |= flagHashFallback
	}
	return s
}

// newServer is the virtual server of a frontend.
func (o *Options) newServer(d *proxier.Decision) server {
	scheduler := o.scheduler()
	if weighted, ok := weightedSchedulers[scheduler]; ok && d.Weighted {
		scheduler = weighted
	}
	if d.Balancing.Algorithm == proxier.Maglev {
		scheduler = "mh"
	}
	s := scheduled(server{}, scheduler)
	if d.Affinity > 0 {
		s.Flags |= flagPersistent
		s.Timeout = uint32(d.Affinity.Seconds())
	}
	return s
}
