// SPDX-License-Identifier: Apache-2.0

// Package vserver has the virtual servers of the kernel's IPVS, as mode ipvs sees them.
package vserver

import (
	"fmt"
	"net/netip"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// Key is what the kernel finds a virtual server by.
type Key struct {
	Addr     netip.AddrPort
	Protocol inet.Protocol
}

func (k Key) String() string { return fmt.Sprintf("%s/%s", k.Addr, k.Protocol) }

// Server is what a virtual server is besides.
type Server struct {
	Scheduler string
	Flags     uint32
	Timeout   uint32 // of session affinity, in seconds
}

// Destination is one of a virtual server.
type Destination struct {
	Weight           int
	Active, Inactive int // connections
}

// Kernel has virtual servers. Adding one that is there changes it, and deleting one that
// is not there succeeds.
type Kernel interface {
	// List is called by full syncs alone.
	List() (map[Key]Server, error)
	// Destinations fails with ESRCH if there is no such virtual server, as do changes.
	Destinations(Key) (map[netip.AddrPort]Destination, error)
	Add(Key, Server) error
	Change(Key, Server) error
	Delete(Key) error
	AddDestination(k Key, to netip.AddrPort, weight int) error
	ChangeDestination(k Key, to netip.AddrPort, weight int) error
	DeleteDestination(k Key, to netip.AddrPort) error
}
