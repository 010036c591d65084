// SPDX-License-Identifier: Apache-2.0

package proxier

import "slices"

// Why says why an endpoint is in a set, or is not.
type Why uint8

// The reasons; the first three are those to be in.
const (
	Ready        Why = iota + 1
	StillServing     // terminating, but none is ready
	LastResort       // quarantined, but no other one can serve
	NotReady
	NotServing  // terminating, and done with serving
	Terminating // still serving, but others are ready
	OtherZone   // topology hints keep to this zone
	OtherNode   // topology hints keep to this node
	Remote      // not on this node
	Maintenance // of weight 0, or an operator says so
	Quarantined // an operator says so, and others can serve
)

// In reports whether it is a reason to be in the set.
func (w Why) In() bool { return w == Ready || w == StillServing || w == LastResort }

func (w Why) String() string {
	return [...]string{"", "ready", "still-serving", "last-resort", "not-ready", "not-serving", "terminating", "other-zone", "other-node", "remote", "maintenance", "quarantined"}[w]
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
		thisZone = thisZone || c.hintedTo(zone)
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

// hintedTo reports whether the endpoint is hinted to a zone.
func (c *candidate) hintedTo(zone string) bool {
	return c.zones != nil && slices.Contains(*c.zones, zone)
}

// eligibility says, for each endpoint of a service port in one family, in
// which sets it is.
type eligibility struct {
	clusterFallback, localFallback bool // no ready endpoint: serving and terminating ones
	clusterLast, localLast         bool // nor these: quarantined ones
	hints                          hints
	zone                           string
}

// newEligibility is about endpoints of which some are quarantined, or none.
func newEligibility(from []candidate, zone string, quarantined bool) eligibility {
	e := eligibility{clusterFallback: true, localFallback: true, zone: zone}
	for i := range from {
		if c := &from[i]; c.is(ready) {
			e.clusterFallback = false
			if c.is(onNode) {
				e.localFallback = false
				break
			}
		}
	}
	if !e.clusterFallback {
		e.hints = topology(from, zone)
	}
	if quarantined {
		e.clusterLast, e.localLast = lastResort(from, 0), lastResort(from, onNode)
	}
	return e
}

// cluster says why the endpoint is in the Cluster set, or is not.
func (e *eligibility) cluster(c *candidate) Why {
	if !c.is(ready) {
		return c.unready(e.clusterFallback, e.clusterLast)
	}
	switch {
	case e.hints == sameNode && !c.is(hintedThisNode):
		return OtherNode
	case e.hints == sameZone && !c.hintedTo(e.zone):
		return OtherZone
	}
	return Ready
}

// local is cluster for the Local set, which knows no topology.
func (e *eligibility) local(c *candidate) Why {
	switch {
	case !c.is(onNode):
		return Remote
	case c.is(ready):
		return Ready
	}
	return c.unready(e.localFallback, e.localLast)
}

func (c *candidate) unready(fallback, last bool) Why {
	switch {
	case c.is(maintenance):
		return Maintenance
	case c.is(isQuarantined) && last:
		return LastResort
	case c.is(isQuarantined):
		return Quarantined
	case !c.is(terminating):
		return NotReady
	case !c.is(serving):
		return NotServing
	case fallback:
		return StillServing
	}
	return Terminating
}

func (e *eligibility) members(c *candidate) Members {
	var m Members
	if e.cluster(c).In() {
		m |= InCluster
	}
	if e.local(c).In() {
		m |= InLocal
	}
	return m
}
