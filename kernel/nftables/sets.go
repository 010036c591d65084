// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/netlink"
)

// set are the elements of a set, if they are ports, or of a map, if they are verdicts.
type set struct {
	ports    []inet.PortRange // nil if the keys are no ports
	verdicts []mapped
}

// mapped is an element of a map of verdicts.
type mapped struct {
	key     string
	verdict Verdict
	target  string
}

// match says which packets have the key, if it is compared with this; false if none that begins a
// connection has.
func (m *mapped) match(with content) (match inet.Match, some bool) {
	switch {
	case with == destinationPort && len(m.key) == 2:
		port := binary.BigEndian.Uint16([]byte(m.key))
		match.Ports = []inet.PortRange{{First: port, Last: port}}
	case with == connState && len(m.key) == 4:
		return match, binary.NativeEndian.Uint32([]byte(m.key))&firstStates != 0
	}
	return match, true
}

// element of a set whose keys may be ports.
type element struct {
	port uint16
	end  bool // the first port after an interval
}

const keyEnd = 10 // NFTA_SET_ELEM_KEY_END

// set reads a set of the table once.
func (r *reader) set(ctx context.Context, name string) (*set, error) {
	if s := r.sets[name]; s != nil {
		return s, nil
	}
	of := netlink.Attr(nil, unix.NFTA_SET_ELEM_LIST_TABLE, append([]byte(r.table), 0))
	of = netlink.Attr(of, unix.NFTA_SET_ELEM_LIST_SET, append([]byte(name), 0))
	s := &set{}
	var elements []element
	ports, intervals := true, false
	err := dump(ctx, request(unix.NFT_MSG_GETSETELEM, familyNumber(r.family), of), func(m netlink.Message) error {
		if m.Kind != subsystem|unix.NFT_MSG_NEWSETELEM || len(m.Body) < genericLen {
			return nil
		}
		list, err := attributes(m.Body[genericLen:])
		if err != nil {
			return err
		}
		return netlink.EachAttr(list[unix.NFTA_SET_ELEM_LIST_ELEMENTS], func(_ uint16, b []byte) error {
			a, err := attributes(b)
			if err != nil {
				return err
			}
			if data := a[unix.NFTA_SET_ELEM_DATA]; data != nil {
				verdict, target := verdictIn(data)
				s.verdicts = append(s.verdicts, mapped{string(a.value(unix.NFTA_SET_ELEM_KEY)), verdict, target})
			}
			intervals = intervals || a[keyEnd] != nil || a.number(unix.NFTA_SET_ELEM_FLAGS)&unix.NFT_SET_ELEM_INTERVAL_END != 0
			key := a.value(unix.NFTA_SET_ELEM_KEY)
			_, isPair := a[keyEnd]
			if ports = ports && len(key) >= 2 && !isPair; ports {
				elements = append(elements, element{binary.BigEndian.Uint16(key), a.number(unix.NFTA_SET_ELEM_FLAGS)&unix.NFT_SET_ELEM_INTERVAL_END != 0})
			}
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list set %s: %w", name, err)
	}
	if ports {
		s.ports = rangesOf(elements)
	}
	for i := range s.verdicts {
		if intervals { // a key is not all that is mapped
			s.verdicts[i].key = ""
		}
	}
	slices.SortStableFunc(s.verdicts, func(a, b mapped) int { return strings.Compare(a.key, b.key) })
	r.sets[name] = s
	return s, nil
}

// rangesOf are the ports of elements. Where one element ends an interval, all others begin one, which
// reaches to the next end. It is nil without any.
func rangesOf(elements []element) (list []inet.PortRange) {
	slices.SortFunc(elements, func(a, b element) int { return int(a.port) - int(b.port) })
	intervals := slices.ContainsFunc(elements, func(e element) bool { return e.end })
	for i, e := range elements {
		switch {
		case e.end:
		case !intervals:
			list = append(list, inet.PortRange{First: e.port, Last: e.port})
		case i+1 == len(elements):
			list = append(list, inet.PortRange{First: e.port, Last: 1<<16 - 1})
		default:
			list = append(list, inet.PortRange{First: e.port, Last: max(e.port, elements[i+1].port-1)})
		}
	}
	return list
}

// prefixOf is an address, cut to whole bytes or masked.
func prefixOf(data, mask []byte, v6 bool) (netip.Prefix, bool) {
	bits := 8 * len(data)
	if mask != nil {
		if len(mask) != len(data) {
			return netip.Prefix{}, false
		}
		bits = 0
		for bits < 8*len(mask) && mask[bits/8]&(0x80>>(bits%8)) != 0 {
			bits++
		}
		for rest := bits; rest < 8*len(mask); rest++ {
			if mask[rest/8]&(0x80>>(rest%8)) != 0 {
				return netip.Prefix{}, false // no prefix
			}
		}
	}
	full := make([]byte, 4)
	if v6 {
		full = make([]byte, 16)
	}
	if copy(full, data) < len(data) {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(full)
	return netip.PrefixFrom(a, bits), ok
}
