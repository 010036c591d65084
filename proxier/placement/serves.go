// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"net/netip"

	"github.com/tandem-proxy/tandem/proxier"
)

// Supports implements proxier.Tier.
func (t *Tier) Supports(d *proxier.Decision, f *proxier.Frontend) error {
	if chosen, reasons := t.choose(d, f); chosen == tiers {
		return errors.Join(reasons...)
	}
	return nil
}

// Overflow counts the service ports that the fast tier has no room for.
func (t *Tier) Overflow() int { return len(t.seen.Load().overflow) }

// Why returns nil if the fast tier serves a frontend, and else why it does not.
func (t *Tier) Why(d *proxier.Decision, f *proxier.Frontend) error {
	if chosen, reasons := t.choose(d, f); chosen != onFast {
		return reasons[onFast]
	}
	return nil
}

// choose says which tier serves a frontend, by what was known after the last Sync.
func (t *Tier) choose(d *proxier.Decision, f *proxier.Frontend) (chosen tier, reasons []error) {
	seen := t.seen.Load()
	list := [tiers]Candidate{
		onFast: {Refuses: func(d *proxier.Decision, f *proxier.Frontend) error {
			return t.fastRefuses(d, f, seen.overflow, seen.served)
		}},
		onFallback: {Refuses: t.fallback.Supports},
	}
	by, reasons := Choose(list[:], d, f)
	return tier(by), reasons
}

// FallbackHas returns a function that reports whether the fallback currently translates
// what comes to an address: that of a frontend, or one with the number of a NodePort.
func (t *Tier) FallbackHas(protocol proxier.Protocol) func(netip.AddrPort) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	has := map[netip.AddrPort]struct{}{}
	for _, item := range t.parts[onFallback].All() {
		d := item.Applied
		if d == nil || d.Name.Protocol != protocol {
			continue
		}
		for i := range d.Frontends {
			if f := &d.Frontends[i]; f.Conflict == nil {
				has[f.Addr] = struct{}{}
			}
		}
	}
	return func(a netip.AddrPort) bool {
		unspecified := netip.IPv4Unspecified()
		if a.Addr().Is6() {
			unspecified = netip.IPv6Unspecified()
		}
		_, frontend := has[a]
		_, nodePort := has[netip.AddrPortFrom(unspecified, a.Port())]
		return frontend || nodePort
	}
}
