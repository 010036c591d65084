// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"net/netip"
	"slices"
)

// candidate is an endpoint that resolved to an address and port.
type candidate struct {
	addr  netip.AddrPort
	flags endpointFlags
	zones *[]string
}

func (c *candidate) is(f endpointFlags) bool { return c.flags&f == f }

// fallback says whether the endpoint takes new connections while no endpoint
// is ready: it is shutting down, but still serves (KEP-1669).
func (c *candidate) fallback() bool { return c.is(serving | terminating) }

// candidates appends the endpoints of one service port in one family to out:
// sorted by address, each address and port once.
func candidates(out []candidate, from []*EndpointSlice, name string, protocol Protocol, family Family) []candidate {
	start := len(out)
	sorted := true
	for _, slice := range from {
		if slice.family != family {
			continue
		}
		for _, p := range slice.ports {
			if p.name != name || p.protocol != protocol {
				continue
			}
			for i := range slice.endpoints {
				e := &slice.endpoints[i]
				c := candidate{addr: netip.AddrPortFrom(e.Addr, p.port), flags: e.flags, zones: e.zones}
				if n := len(out); n > start && c.addr.Compare(out[n-1].addr) <= 0 {
					sorted = false
				}
				out = append(out, c)
			}
		}
	}
	if sorted {
		return out
	}

	// An endpoint may stand in two slices while it moves between them. The
	// copy that is not terminating wins, else the one of the first slice.
	list := out[start:]
	slices.SortStableFunc(list, func(a, b candidate) int { return a.addr.Compare(b.addr) })
	kept := list[:0]
	for _, c := range list {
		if n := len(kept); n > 0 && kept[n-1].addr == c.addr {
			if kept[n-1].is(terminating) && !c.is(terminating) {
				kept[n-1] = c
			}
			continue
		}
		kept = append(kept, c)
	}
	return out[:start+len(kept)]
}

// hints is how close to the client the cluster's endpoints have to be.
type hints uint8

const (
	anywhere hints = iota
	sameZone
	sameNode
)

// topology decides from the ready endpoints whether their hints are followed:
// only if every one of them has one, and one of them is for this node or zone.
func topology(from []candidate, zone string) hints {
	allNode, allZone := true, zone != ""
	thisNode, thisZone := false, false
	for i := range from {
		c := &from[i]
		if !c.is(ready) {
			continue
		}
		allNode = allNode && c.is(hasNodeHints)
		thisNode = thisNode || c.is(hintedThisNode)
		allZone = allZone && c.zones != nil
		thisZone = thisZone || c.zones != nil && slices.Contains(*c.zones, zone)
		if !allNode && !allZone {
			return anywhere
		}
	}
	switch {
	case allNode && thisNode:
		return sameNode
	case allZone && thisZone:
		return sameZone
	}
	return anywhere
}

func (h hints) allow(c *candidate, zone string) bool {
	switch h {
	case sameNode:
		return c.is(hintedThisNode)
	case sameZone:
		return slices.Contains(*c.zones, zone)
	}
	return true
}

// eligibility says, for each endpoint of a service port in one family, in
// which sets it is.
type eligibility struct {
	clusterFallback, localFallback bool // no ready endpoint: serving and terminating ones
	hints                          hints
	zone                           string
}

func newEligibility(from []candidate, zone string) eligibility {
	e := eligibility{clusterFallback: true, localFallback: true, zone: zone}
	for i := range from {
		if c := &from[i]; c.is(ready) {
			e.clusterFallback = false
			if c.is(local) {
				e.localFallback = false
				break
			}
		}
	}
	if !e.clusterFallback {
		e.hints = topology(from, zone)
	}
	return e
}

func (e *eligibility) members(c *candidate) Members {
	var m Members
	if e.clusterFallback {
		if c.fallback() {
			m |= InCluster
		}
	} else if c.is(ready) && e.hints.allow(c, e.zone) {
		m |= InCluster
	}
	if c.is(local) && (!e.localFallback && c.is(ready) || e.localFallback && c.fallback()) {
		m |= InLocal
	}
	return m
}
