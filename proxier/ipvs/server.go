// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"fmt"
	"net/netip"

	"github.com/tandem-proxy/tandem/proxier"
)

// serverKey is what the kernel finds a virtual server by.
type serverKey struct {
	addr     netip.AddrPort
	protocol proxier.Protocol
}

func (k serverKey) String() string { return fmt.Sprintf("%s/%s", k.addr, k.protocol) }

// server is what a virtual server is besides.
type server struct {
	scheduler string
	flags     uint32
	timeout   uint32 // of affinity, in seconds
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

// destination is one of a virtual server.
type destination struct {
	weight           int
	active, inactive int // connections
}

// newServer is the virtual server of a frontend.
func (o *Options) newServer(d *proxier.Decision) server {
	s := server{scheduler: o.scheduler()}
	switch s.scheduler {
	case "mh":
		s.flags = flagHashPort | flagHashFallback
	case "sh":
		s.flags = flagHashFallback
	}
	if d.Affinity > 0 {
		s.flags |= flagPersistent
		s.timeout = uint32(d.Affinity.Seconds())
	}
	return s
}
