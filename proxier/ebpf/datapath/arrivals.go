// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// ArrivalFilter selects packets that may be for a frontend and that nothing has translated, for package
// kernel/packetsocket.
type ArrivalFilter struct {
	Program *ciliumebpf.Program
	covered *ciliumebpf.Variable
	cover   Cover
}

// LoadArrivalFilter loads it with these maps, which stay the caller's.
func LoadArrivalFilter(ctx context.Context, maps lbmap.Maps, nodePorts PortRange) (*ArrivalFilter, error) {
	spec, err := lbmap.ArrivalSpec()
	if err != nil {
		return nil, err
	}
	replacements := lbmap.Maps{}
	for name := range spec.Maps {
		switch name {
		case "tdm_local", "tdm_vip", "tdm_uplink":
			replacements[name] = maps[name]
			spec.Maps[name].MaxEntries = maps[name].MaxEntries()
		default:
			if lbmap.HasOwnName(name) {
				delete(spec.Maps, name)
			}
		}
	}
	for name, value := range map[string]uint16{"first_node_port": nodePorts.First, "last_node_port": nodePorts.Last} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	collection, err := Load(ctx, "filter of packet sockets", spec, ciliumebpf.CollectionOptions{MapReplacements: replacements})
	if err != nil {
		return nil, err
	}
	defer collection.Close()
	return &ArrivalFilter{Program: collection.DetachProgram("tdm_arrival"), covered: collection.Variables["covered"]}, nil
}

// Cover has the filter select packets to the ClusterIPs of an update.
func (f *ArrivalFilter) Cover(u proxier.Update) error {
	if u.Full {
		f.cover = Cover{}
	}
	var value lbmap.Cover
	changed := u.Full
	for _, c := range u.Changes {
		if c.New == nil {
			continue
		}
		for i := range c.New.Frontends {
			if fe := &c.New.Frontends[i]; !fe.Kind.External() {
				changed = f.cover.Add(fe.Addr.Addr(), len(value.Prefix)) || changed
			}
		}
	}
	if !changed {
		return nil
	}
	for i, p := range f.cover.list {
		prefix := lbmap.FromPrefix(p)
		value.Prefix[i].Addr, value.Prefix[i].Mask = prefix.Addr, prefix.Mask
	}
	value.Prefixes = uint32(len(f.cover.list))
	if err := f.covered.Set(value); err != nil {
		return fmt.Errorf("write the prefixes of ClusterIPs: %w", err)
	}
	return nil
}

// Close releases the program.
func (f *ArrivalFilter) Close() {
	if f != nil {
		f.Program.Close()
	}
}

// ParseArrival reads where a packet that the filter selected goes.
func ParseArrival(packet []byte) (to netip.AddrPort, protocol proxier.Protocol, ok bool) {
	if len(packet) < 20 {
		return to, 0, false
	}
	var addr netip.Addr
	at := 40
	switch {
	case packet[0]>>4 == 4:
		addr, _ = netip.AddrFromSlice(packet[16:20])
		at, protocol = int(packet[0]&15)*4, proxier.Protocol(packet[9])
	case len(packet) >= 40:
		addr, _ = netip.AddrFromSlice(packet[24:40])
		protocol = proxier.Protocol(packet[6])
	}
	if len(packet) < at+4 || !addr.IsValid() {
		return to, 0, false
	}
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(packet[at+2:])), protocol, true
}
