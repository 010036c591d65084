// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
)

// Forwarding is how packets of clients outside reach backends on other nodes.
type Forwarding uint8

// The modes of forwarding.
const (
	// UnsetForwarding leaves the choice to the configuration, and there means that no tier can do anything but SNAT.
	UnsetForwarding Forwarding = iota
	// SNAT masquerades them, so that replies come back here.
	SNAT
	// DSR is direct server return: backends see the client, and their nodes answer it.
	DSR
	// Hybrid is DSR for TCP, and SNAT for UDP.
	Hybrid
)

var forwardingNames = [...]string{"", "snat", "dsr", "hybrid"}

// ParseForwarding reads the name of a mode of forwarding.
func ParseForwarding(name string) (Forwarding, error) {
	for f, known := range forwardingNames {
		if name == known && name != "" {
			return Forwarding(f), nil
		}
	}
	return UnsetForwarding, fmt.Errorf("unknown forwarding mode %.32q: want snat, dsr or hybrid", name)
}

func (f Forwarding) String() string { return forwardingNames[f] }

// over reports whether a service port of a Service, which has the first word, gets direct server return. Nothing
// does where the configuration leaves the mode unset.
func (f Forwarding) over(configured Forwarding, protocol Protocol) (direct bool) {
	if configured == UnsetForwarding {
		return false
	}
	if f == UnsetForwarding {
		f = configured
	}
	return f == DSR && (protocol == TCP || protocol == UDP) || f == Hybrid && protocol == TCP
}

// direct reports whether a service port gets direct server return. Endpoints' nodes have to know its frontends: they do unless the
// Service selects nodes.
func (s *Service) direct(configured Forwarding, protocol Protocol) bool {
	return !s.IsPod && (s.More == nil || s.More.selector == nil) && s.Forwarding.over(configured, protocol)
}

// directRoutes marks the routes of clients outside that may lead to other nodes. Those do not know of addresses that this one derives.
func directRoutes(list []Frontend) {
	for i := range list {
		f := &list[i]
		if r := &f.Routes[FromOutside]; !r.Set.Local() && !f.Derived {
			r.Direct = true
		}
	}
}

// Direct reports whether the decision has a route of direct server return.
func (d *Decision) Direct() bool {
	for i := range d.Frontends {
		if d.Frontends[i].Routes[FromOutside].Direct {
			return true
		}
	}
	return false
}
