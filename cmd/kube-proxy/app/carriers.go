// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier"
)

var (
	errNoPackets   = errors.New("this kernel cannot have programs translate packets")
	errPodsLeftOut = errors.New("sockets of pods are left alone (ebpf.socketLB: host)")
)

// refusal is why the tier of the mode does not carry a frontend for clients of an origin;
// nil if it does. The tiers are open.
func (p *proxy) refusal(d *proxier.Decision, f *proxier.Frontend, o proxier.Origin) error {
	t := &p.tiers
	var why error
	switch {
	case t.ipvs != nil:
		return t.ipvs.Why(d, f)
	case t.fast == nil:
		return t.rules.Supports(d, f)
	case t.placed != nil:
		why = t.placed.Why(d, f)
	default:
		why = t.fast.Supports(d, f)
	}
	switch {
	case why != nil:
		return why
	case o == proxier.FromOutside && len(missingForPackets(&p.report)) > 0:
		return errNoPackets
	case o == proxier.FromPod && p.opts.Config.Tandem.EBPF.SocketLB == config.SocketLBHost:
		return errPodsLeftOut
	}
	return nil
}

// rulesInstead says whether rules carry what the fast path does not.
func (p *proxy) rulesInstead(d *proxier.Decision, f *proxier.Frontend) bool {
	t := &p.tiers
	switch {
	case t.ipvs != nil:
		return t.ipvs.Supports(d, f) == nil
	case t.fast == nil || t.rules == nil:
		return false
	}
	return t.rules.Supports(d, f) == nil
}

// carrier implements explain.PlacementFunc.
func (p *proxy) carrier(d *proxier.Decision, f *proxier.Frontend, o proxier.Origin) (tier, reason string, shown bool) {
	p.tierMu.Lock()
	defer p.tierMu.Unlock()
	if p.tiers == (tiers{}) {
		return "", "", false // not open any more
	}
	why := p.refusal(d, f, o)
	switch {
	case why == nil:
		return string(p.decision.Mode), "", p.tiers.fast == nil
	case p.rulesInstead(d, f):
		return string(capabilities.ModeIPTables), why.Error(), true
	}
	return "", why.Error(), true
}

// explainTiers says whether the tiers carry the frontend of an explanation.
func (p *proxy) explainTiers(e *proxier.Explanation) []explain.Tier {
	p.tierMu.Lock()
	defer p.tierMu.Unlock()
	fast := p.tiers.fast
	if p.tiers == (tiers{}) {
		return nil
	}
	t := explain.Tier{Name: string(p.decision.Mode), Carries: true}
	if why := p.refusal(e.Decision, e.Frontend, e.Origin); why != nil {
		t.Carries, t.Detail = false, why.Error()
		if p.rulesInstead(e.Decision, e.Frontend) {
			return []explain.Tier{t, {Name: string(capabilities.ModeIPTables), Carries: true}}
		}
		return []explain.Tier{t}
	}
	if fast == nil {
		return []explain.Tier{t}
	}
	switch unplaced := len(fast.Unplaced()); {
	case unplaced > 0 && p.tiers.placed == nil:
		t.Detail = fmt.Sprintf("if it fits: %d service ports do not, which 'tandemctl services' names", unplaced)
	case e.Origin == proxier.FromOutside:
		t.Detail = "by packets: an endpoint on this node sees the client, one elsewhere sees this node"
	case e.Origin == proxier.FromPod && e.Route.Source == proxier.Masquerade:
		t.Detail = "at the socket of a pod of this node, where nothing is masqueraded: endpoints see the client"
	}
	return []explain.Tier{t}
}
