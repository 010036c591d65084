// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"os"
	"slices"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// without removes a range from the others.
func without(list []PortRange, cut PortRange) (left []PortRange) {
	for _, r := range list {
		if !r.Overlaps(cut) {
			left = append(left, r)
			continue
		}
		if r.First < cut.First {
			left = append(left, PortRange{r.First, cut.First - 1})
		}
		if r.Last > cut.Last {
			left = append(left, PortRange{cut.Last + 1, r.Last})
		}
	}
	return left
}

// SNATPool is where connections to remote backends get their source ports
// from.
type SNATPool struct {
	ranges [lbmap.SNATRanges]PortRange
	// usual counts the ports that come first; the others are ephemeral ports of this host,
	// for when the usual ones are used up.
	usual, all int
}

// NewSNATPool has all ports from 1024 on except NodePorts.
func NewSNATPool(nodePorts, ephemeral PortRange) SNATPool {
	all := without([]PortRange{{1024, 65535}}, nodePorts)
	usual := all
	var spare []PortRange
	if !ephemeral.none() {
		usual = without(all, ephemeral)
		spare = without(without([]PortRange{ephemeral}, nodePorts), PortRange{1, 1023})
	}
	if len(usual) == 0 {
		usual, spare = spare, nil
	}
	var p SNATPool
	copy(p.ranges[:], slices.Concat(usual, spare))
	for i, r := range p.ranges {
		p.all += r.count()
		if i < len(usual) {
			p.usual += r.count()
		}
	}
	return p
}

func (p *SNATPool) bpf() (list [lbmap.SNATRanges]lbmap.PortSpan) {
	for i, r := range p.ranges {
		list[i] = lbmap.PortSpan{First: r.First, Count: uint16(r.count())}
	}
	return list
}

// EphemeralPorts is the range of source ports that the kernel uses in the network namespace of
// the calling thread.
func EphemeralPorts() (r PortRange, err error) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return r, fmt.Errorf("read the range of local ports: %w", err)
	}
	if _, err := fmt.Sscan(string(text), &r.First, &r.Last); err != nil {
		return r, fmt.Errorf("read the range of local ports: %q: %w", text, err)
	}
	return r, nil
}

// PortRange is a range of ports, its ends included. The zero value is none.
type PortRange struct{ First, Last uint16 }

// String has a - between the ports.
func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

func (r PortRange) none() bool { return r.First == 0 }

func (r PortRange) count() int {
	if r.none() {
		return 0
	}
	return int(r.Last) - int(r.First) + 1
}

// Overlaps reports whether the ranges have a port in common.
func (r PortRange) Overlaps(o PortRange) bool {
	return !r.none() && !o.none() && r.First <= o.Last && o.First <= r.Last
}
