// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	vishnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// ipsets are the sets of a network namespace.
type ipsets struct {
	nl       *netlink.Handle
	socket   *nl.NetlinkSocket
	families []proxier.Family // of which there are sets
}

// openSets opens those of the network namespace of the calling thread.
func openSets(handle *netlink.Handle, families ...proxier.Family) (*ipsets, error) {
	socket, err := nl.GetNetlinkSocketAt(vishnetns.None(), vishnetns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open ipset: %w", err)
	}
	return &ipsets{nl: handle, socket: socket, families: families}, nil
}

func (s *ipsets) close() { s.socket.Close() }

// ensure makes those that are not there, with upstream's parameters: sets with others
// could not be taken over.
func (s *ipsets) ensure() error {
	for _, f := range s.families {
		for name := range setNames {
			if err := s.create(set{name, f}.String(), allSets[name].is, f); err != nil {
				return fmt.Errorf("create ipset %s (%s): %w", set{name, f}, allSets[name].is, err)
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
			list, err := s.list(set{name, f})
			if err != nil {
				return nil, err
			}
			all = append(all, list...)
		}
	}
	return all, nil
}

// exists asks the network namespace of the calling thread.
func (of set) exists() (bool, error) {
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_IPSET<<8|nl.IPSET_CMD_HEADER, unix.NLM_F_REQUEST)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: uint8(addressFamilies[of.family]), Version: nl.NFNETLINK_V0})
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated(of.String())))
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

func (s *ipsets) list(of set) ([]member, error) {
	found, err := s.nl.IpsetList(of.String())
	if err != nil {
		return nil, fmt.Errorf("list ipset %s: %w", of, err)
	}
	list := make([]member, len(found.Entries))
	for i := range found.Entries {
		list[i] = parse(of, &found.Entries[i])
	}
	return list, nil
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

func (s *ipsets) Add(m member) error    { return s.change(nl.IPSET_CMD_ADD, m) }
func (s *ipsets) Delete(m member) error { return s.change(nl.IPSET_CMD_DEL, m) }

// change adds a member, or deletes it. The library sends a protocol to every type that
// has ports, which the kernel does not take of bitmaps.
func (s *ipsets) change(cmd int, m member) error {
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_IPSET<<8|cmd, nl.GetIpsetFlags(cmd))
	request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: s.socket}}
	request.AddData(&nl.Nfgenmsg{NfgenFamily: uint8(addressFamilies[m.family]), Version: nl.NFNETLINK_V0})
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated(m.set.String())))
	request.AddData(data(m))
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	var errno unix.Errno
	if errors.As(err, &errno) && errno >= nl.IPSET_ERR_PRIVATE {
		return nl.IPSetError(errno)
	}
	return err
}

// data is what a message says of a member.
func data(m member) *nl.RtAttr {
	out := nl.NewRtAttr(unix.NLA_F_NESTED|nl.IPSET_ATTR_DATA, nil)
	address := func(attr int, a netip.Addr) {
		is := [proxier.Families]int{nl.IPSET_ATTR_IPADDR_IPV4, nl.IPSET_ATTR_IPADDR_IPV6}[proxier.FamilyOf(a)]
		out.AddRtAttr(unix.NLA_F_NESTED|attr, nil).AddRtAttr(unix.NLA_F_NET_BYTEORDER|is, a.AsSlice())
	}
	if m.addr.IsValid() {
		address(nl.IPSET_ATTR_IP, m.addr)
	}
	if m.protocol != 0 {
		out.AddRtAttr(nl.IPSET_ATTR_PROTO, nl.Uint8Attr(uint8(m.protocol)))
	}
	if allSets[m.name].is != hashIP {
		out.AddRtAttr(unix.NLA_F_NET_BYTEORDER|nl.IPSET_ATTR_PORT, binary.BigEndian.AppendUint16(nil, m.port))
	}
	if m.from.IsValid() {
		address(nl.IPSET_ATTR_IP2, m.from.Addr())
		if allSets[m.name].is == hashIPPortNet {
			out.AddRtAttr(nl.IPSET_ATTR_CIDR2, nl.Uint8Attr(uint8(m.from.Bits())))
		}
	}
	return out
}

// remove destroys them all.
func (s *ipsets) remove() error {
	var errs []error
	for _, f := range s.families {
		for name := range setNames {
			if err := unless(s.nl.IpsetDestroy(set{name, f}.String()), unix.ENOENT, nl.IPSetError(nl.IPSET_ERR_PROTOCOL)); err != nil {
				errs = append(errs, fmt.Errorf("destroy ipset %s: %w", set{name, f}, err))
			}
		}
	}
	return errors.Join(errs...)
}
