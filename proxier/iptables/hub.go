// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// hubName is one of the chains that all service ports share.
type hubName uint8

const (
	servicesNAT hubName = iota
	nodePortsNAT
	servicesFilter
	externalServicesFilter
	nodePortsFilter
	firewallFilter
	healthChecksFilter
	hubs
)

var hubChains = [hubs]struct {
	table, chain string
	// slots begins the names of chains of the tree. A chain that leads somewhere keeps
	// that from being deleted: those of nat have names that upstream, where it takes over,
	// believes to be of service ports, and deletes.
	slots  string
	byPort bool
}{
	servicesNAT:            {"nat", servicesChain, clusterPrefix + "SLOT-", false},
	nodePortsNAT:           {"nat", nodePortsChain, externalPrefix + "SLOT-", true},
	servicesFilter:         {"filter", servicesChain, servicesChain + "-", false},
	externalServicesFilter: {"filter", externalServicesChain, externalServicesChain + "-", false},
	nodePortsFilter:        {"filter", externalNodePortsChain, externalNodePortsChain + "-", true},
	firewallFilter:         {"filter", proxyFirewallChain, proxyFirewallChain + "-", false},
	healthChecksFilter:     {"filter", nodePortsChain, nodePortsChain + "-", true},
}

// slot is the part of a hub that a rule stands in: those whose address ends in the
// same bits, or whose ports are neighbours.
type slot uint32

const (
	addrSlots    = 128
	portsPerSlot = 64
)

func addrSlot(a netip.Addr) slot {
	b := a.AsSlice()
	return slot(b[len(b)-1] % addrSlots)
}

func portSlot(protocol proxier.Protocol, port uint16) slot {
	return slot(protocol)<<16 | slot(port/portsPerSlot)
}

// A packet passes all rules of a chain until one is for it. With more of them than
// splitAt, a hub becomes a tree: it holds a rule for each slot, and a slot's chain
// holds what the hub held. With fewer than joinAt it is one chain again, with
// upstream's look.
const (
	splitAt = 128
	joinAt  = 64
)

// hub is what a chain that all service ports share is to hold, in one family.
type hub struct {
	name   hubName
	family proxier.Family
	split  bool
	// wished is the shape that fitted what was there after everything was compared last.
	// That is another one than it has if much of what it should hold was refused.
	wished bool
	// tail stands behind everything else.
	tail []string
	// slots have their rules, and how many service ports want each.
	slots map[slot]map[string]int
	size  int
	// made are the chains that are there and that packets reach, and stale those
	// that the kernel has otherwise, or may have.
	made, stale map[string]struct{}
}

func newHub(name hubName, family proxier.Family) *hub {
	return &hub{name: name, family: family, slots: map[slot]map[string]int{}, made: map[string]struct{}{}, stale: map[string]struct{}{}}
}

func (h *hub) table() string { return hubChains[h.name].table }

// chain is the hub's own.
func (h *hub) chain() string { return hubChains[h.name].chain }

// chainOf is where the rules of a slot stand.
func (h *hub) chainOf(s slot) string {
	switch {
	case !h.split:
		return h.chain()
	case hubChains[h.name].byPort:
		return fmt.Sprintf("%s%d-%d", hubChains[h.name].slots, s>>16, s&0xffff*portsPerSlot)
	}
	return fmt.Sprintf("%s%02X", hubChains[h.name].slots, uint32(s))
}

// owns says whether a chain of its table is the hub's.
func (h *hub) owns(chain string) bool {
	return chain == h.chain() || strings.HasPrefix(chain, hubChains[h.name].slots)
}

// branch is the rule that leads to a slot.
func (h *hub) branch(s slot) string {
	r := rule{target: h.chainOf(s)}
	if hubChains[h.name].byPort {
		first := int(s&0xffff) * portsPerSlot
		r.protocol, r.port = proxier.Protocol(s>>16), fmt.Sprintf("%d:%d", first, first+portsPerSlot-1)
		return r.String()
	}
	if h.family == proxier.IPv6 {
		r.dest = fmt.Sprintf("%s/%s", lowByte(h.family, byte(s)), lowByte(h.family, addrSlots-1))
	} else {
		r.dest = fmt.Sprintf("0.0.0.%d/0.0.0.%d", s, addrSlots-1)
	}
	return r.String()
}

func lowByte(family proxier.Family, b byte) netip.Addr {
	if family == proxier.IPv4 {
		return netip.AddrFrom4([4]byte{3: b})
	}
	return netip.AddrFrom16([16]byte{15: b})
}

// chains are all chains of the hub and their rules, in no order but for the tail.
func (h *hub) chains() map[string][]string {
	all := map[string][]string{h.chain(): nil}
	for s := range h.slots {
		rules := slices.Sorted(maps.Keys(h.slots[s]))
		name := h.chainOf(s)
		if h.split {
			all[h.chain()] = append(all[h.chain()], h.branch(s))
		}
		all[name] = append(all[name], rules...)
	}
	slices.Sort(all[h.chain()])
	all[h.chain()] = append(all[h.chain()], h.tail...)
	return all
}

// rules counts those of all chains of the hub.
func (h *hub) rules() int {
	n := h.size + len(h.tail)
	if h.split {
		n += len(h.slots)
	}
	return n
}

// letGo has a tree lead no longer to chains that hold nothing.
func (h *hub) letGo() {
	chains := h.chains()
	for name := range h.made {
		if !has(chains, name) {
			h.stale[h.chain()] = struct{}{}
		}
	}
}

// written notes that stale chains are as they should be.
func (h *hub) written() {
	chains := h.chains()
	for name := range h.stale {
		h.made[name] = struct{}{}
	}
	if has(h.stale, h.chain()) { // which leads to those alone that hold something
		maps.DeleteFunc(h.made, func(name string, _ struct{}) bool { return !has(chains, name) })
	}
	clear(h.stale)
}

// rulesOf are the rules of one of its chains.
func (h *hub) rulesOf(chain string) []string {
	if chain == h.chain() {
		return h.chains()[chain]
	}
	for s, rules := range h.slots {
		if h.chainOf(s) == chain {
			return slices.Sorted(maps.Keys(rules))
		}
	}
	return nil
}

// change counts a rule in or out, and says whether the chain is another now.
func (h *hub) change(s slot, rule string, by int) bool {
	rules := h.slots[s]
	if rules == nil {
		rules = map[string]int{}
		h.slots[s] = rules
	}
	before := rules[rule]
	rules[rule] += by
	switch {
	case rules[rule] == 0:
		delete(rules, rule)
		h.size--
		if len(rules) == 0 {
			delete(h.slots, s)
		}
		return true
	case before == 0:
		h.size++
		return true
	}
	return false
}

// wantsSplit says which shape fits.
func (h *hub) wantsSplit(size int) bool {
	if h.split {
		return size > joinAt
	}
	return size > splitAt
}

// wantsOtherShape says whether it has grown, or shrunk, so far that it is to be written
// otherwise.
func (h *hub) wantsOtherShape() bool {
	fits := h.wantsSplit(h.size)
	return fits != h.split && fits != h.wished
}

// holds says whether rules of a chain in the kernel are as they should be: those of a
// hub may stand in any order, with the tail behind them.
func holds(got, want []string, tail int) bool {
	if len(got) != len(want) || !slices.Equal(got[len(got)-tail:], want[len(want)-tail:]) {
		return false
	}
	return slices.Equal(slices.Sorted(slices.Values(got[:len(got)-tail])), slices.Sorted(slices.Values(want[:len(want)-tail])))
}
