// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// ipsets are the sets of a network namespace.
type ipsets struct {
	nl       *netlink.Handle
	families []proxier.Family // of which there are sets
}

// ensure makes those that are not there, with upstream's parameters: sets with others
// could not be taken over.
func (s *ipsets) ensure() error {
	for _, f := range s.families {
		for name := range setNames {
			if err := s.create(set{name, f}.String(), allSets[name].is, f); err != nil {
				return fmt.Errorf("make set %s (%s): %w", set{name, f}, allSets[name].is, err)
			}
		}
	}
	return nil
}

func (s *ipsets) create(name string, is setType, f proxier.Family) error {
	return s.nl.IpsetCreate(name, string(is), netlink.IpsetCreateOptions{
		Replace: true, Family: uint8(addressFamilies[f]), PortTo: 65535,
	})
}

func (s *ipsets) List() (all []member, err error) {
	for _, f := range s.families {
		for name := range setNames {
			list, err := s.nl.IpsetList(set{name, f}.String())
			if err != nil {
				return nil, fmt.Errorf("list set %s: %w", set{name, f}, err)
			}
			for i := range list.Entries {
				all = append(all, parse(set{name, f}, &list.Entries[i]))
			}
		}
	}
	return all, nil
}

// parse reads a member.
func parse(in set, e *netlink.IPSetEntry) member {
	m := member{set: in}
	m.addr, _ = netip.AddrFromSlice(e.IP)
	if e.Port != nil {
		m.port = *e.Port
	}
	if e.Protocol != nil {
		m.protocol = proxier.Protocol(*e.Protocol)
	}
	if from, ok := netip.AddrFromSlice(e.IP2); ok {
		bits := from.BitLen()
		if e.CIDR2 != 0 {
			bits = int(e.CIDR2)
		}
		m.from = netip.PrefixFrom(from, bits)
	}
	return m
}

func entry(m member) *netlink.IPSetEntry {
	e := &netlink.IPSetEntry{Replace: true}
	if m.addr.IsValid() {
		e.IP = net.IP(m.addr.AsSlice())
	}
	if allSets[m.name].is != hashIP {
		protocol := uint8(m.protocol)
		e.Port, e.Protocol = &m.port, &protocol
	}
	if m.from.IsValid() {
		e.IP2 = net.IP(m.from.Addr().AsSlice())
		if allSets[m.name].is == hashIPPortNet {
			e.CIDR2 = uint8(m.from.Bits())
		}
	}
	return e
}

func (s *ipsets) Add(m member) error { return s.nl.IpsetAdd(m.set.String(), entry(m)) }

func (s *ipsets) Delete(m member) error {
	return s.nl.IpsetDel(m.set.String(), entry(m))
}

// remove destroys them all.
func (s *ipsets) remove() error {
	var errs []error
	for _, f := range s.families {
		for name := range setNames {
			if err := unless(s.nl.IpsetDestroy(set{name, f}.String()), unix.ENOENT, nl.IPSetError(nl.IPSET_ERR_PROTOCOL)); err != nil {
				errs = append(errs, fmt.Errorf("destroy set %s: %w", set{name, f}, err))
			}
		}
	}
	return errors.Join(errs...)
}
