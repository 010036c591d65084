// SPDX-License-Identifier: Apache-2.0

package iptables

import "github.com/tandem-proxy/tandem/proxier"

// origins is a set of origins.
type origins uint8

func (o origins) has(x proxier.Origin) bool { return o&(1<<x) != 0 }

const allOrigins origins = 1<<proxier.Origins - 1

// from narrows a rule to some origins. Packets of origins in others may match it or not.
func (r *renderer) from(of rule, some, others origins) (list []rule) {
	if !r.knowsPods() {
		others |= 1 << proxier.FromPod
	}
	switch {
	case some == 0:
		return nil
	case some|others == allOrigins:
		return []rule{of}
	case others.has(proxier.FromPod), !some.has(proxier.FromPod):
		if !others.has(proxier.FromPod) {
			of.source, of.device = not(r.podSource), not(r.podDevice)
		}
		host, outside := some.has(proxier.FromHost), some.has(proxier.FromOutside)
		switch {
		case host && !outside && !others.has(proxier.FromOutside):
			of.matches = fromLocal
		case outside && !host && !others.has(proxier.FromHost):
			of.matches = "-m addrtype ! --src-type LOCAL"
		}
		return []rule{of}
	}
	pods := of
	pods.source, pods.device = r.podSource, r.podDevice
	return append([]rule{pods}, r.from(of, some&^(1<<proxier.FromPod), others)...)
}

// empty reports whether a route has no endpoints.
func (p *portRenderer) empty(r proxier.Route) bool { return len(p.members[setIndex(r.Set)]) == 0 }

// masquerades reports whether a connection gets this node's address. Where the route leaves
// that open (AnySource) it does.
func masquerades(r proxier.Route) bool { return r.Source != proxier.KeepSource }

// which are the origins whose route satisfies a condition.
func which(f *proxier.Frontend, is func(proxier.Route) bool) (o origins) {
	for origin, route := range f.Routes {
		if is(route) {
			o |= 1 << origin
		}
	}
	return o
}
