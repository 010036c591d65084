// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/netlink"
)

// Constants of include/uapi/linux/netfilter/{nfnetlink,nfnetlink_conntrack}.h that the
// netlink library lacks.
const (
	subsystem = 1 << 8 // NFNL_SUBSYS_CTNETLINK
	msgNew    = subsystem | nl.IPCTNL_MSG_CT_NEW
	msgGet    = subsystem | nl.IPCTNL_MSG_CT_GET
	msgDelete = subsystem | nl.IPCTNL_MSG_CT_DELETE

	attrID        = 12 // CTA_ID
	attrZone      = 18 // CTA_ZONE
	attrStatus    = 3  // CTA_STATUS
	attrFilter    = 25 // CTA_FILTER
	attrMask      = 26 // CTA_STATUS_MASK
	attrTupleZone = 3  // CTA_TUPLE_ZONE
	attrOrigFlags = 1  // CTA_FILTER_ORIG_FLAGS
	filterProto   = 8  // CTA_FILTER_F_CTA_PROTO_NUM

	// Bits of the status. The kernel refuses a new entry without confirmed.
	seenReply = 1 << 1 // IPS_SEEN_REPLY
	assured   = 1 << 2 // IPS_ASSURED
	confirmed = 1 << 3 // IPS_CONFIRMED

	// Of nf_conntrack_tcp.h.
	tcpEstablished = 3    // TCP_CONNTRACK_ESTABLISHED
	tcpSACK        = 0x02 // IP_CT_TCP_FLAG_SACK_PERM
	tcpBeLiberal   = 0x08 // IP_CT_TCP_FLAG_BE_LIBERAL

	genericLen = 4 // struct nfgenmsg
)

// addressFamily returns the kernel's number of a family.
func addressFamily(f inet.Family) uint8 {
	if f == inet.IPv4 {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// begin appends the headers of a message.
func begin(b []byte, kind, flags uint16, seq uint32, family inet.Family) []byte {
	return append(netlink.Begin(b, kind, flags, seq), addressFamily(family), nl.NFNETLINK_V0, 0, 0)
}

// listRequest requests all entries of a family and protocol, or only those without a reply.
// Kernels before 5.8 ignore the protocol, those before 5.16 whether there was a reply.
func listRequest(family inet.Family, protocol inet.Protocol, unanswered bool, seq uint32) []byte {
	b := begin(nil, msgGet, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, seq, family)
	b = netlink.Nest(b, nl.CTA_TUPLE_ORIG, func(b []byte) []byte {
		return netlink.Nest(b, nl.CTA_TUPLE_PROTO, func(b []byte) []byte {
			return netlink.Attr(b, nl.CTA_PROTO_NUM, []byte{uint8(protocol)})
		})
	})
	b = netlink.Nest(b, attrFilter, func(b []byte) []byte {
		return netlink.Attr(b, attrOrigFlags, binary.NativeEndian.AppendUint32(nil, filterProto))
	})
	if unanswered {
		b = netlink.Attr(b, attrStatus, binary.BigEndian.AppendUint32(nil, 0))
		b = netlink.Attr(b, attrMask, binary.BigEndian.AppendUint32(nil, seenReply))
	}
	return netlink.End(b, 0)
}

// deleteRequest appends a request to delete one entry. The addresses are required:
// without them, the kernel deletes all entries.
func deleteRequest(b []byte, f *Flow, seq uint32) []byte {
	start := len(b)
	b = begin(b, msgDelete, unix.NLM_F_REQUEST|unix.NLM_F_ACK, seq, inet.FamilyOf(f.Destination.Addr()))
	b = appendTuple(b, nl.CTA_TUPLE_ORIG, f.Protocol, f.Source, f.Destination)
	b = netlink.Attr(b, attrID, binary.BigEndian.AppendUint32(nil, f.ID))
	return netlink.End(b, start)
}

// getRequest requests the entry whose original direction has the flow's addresses.
func getRequest(f *Flow, seq uint32) []byte {
	b := begin(nil, msgGet, unix.NLM_F_REQUEST, seq, inet.FamilyOf(f.Destination.Addr()))
	return netlink.End(appendTuple(b, nl.CTA_TUPLE_ORIG, f.Protocol, f.Source, f.Destination), 0)
}

// createRequest appends a request to create the entry of an established TCP connection, with a timeout. Conntrack has not seen its
// handshake, and so not its window scale: as in an entry that a packet in mid-stream creates, its window is not checked.
func createRequest(b []byte, f *Flow, seconds, seq uint32) []byte {
	start := len(b)
	b = begin(b, msgNew, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL, seq, inet.FamilyOf(f.Destination.Addr()))
	b = appendTuple(b, nl.CTA_TUPLE_ORIG, f.Protocol, f.Source, f.Destination)
	b = appendTuple(b, nl.CTA_TUPLE_REPLY, f.Protocol, f.Replies, f.Seen)
	b = netlink.Attr(b, nl.CTA_TIMEOUT, binary.BigEndian.AppendUint32(nil, seconds))
	b = netlink.Attr(b, attrStatus, binary.BigEndian.AppendUint32(nil, seenReply|assured|confirmed))
	b = netlink.Nest(b, nl.CTA_PROTOINFO, func(b []byte) []byte {
		return netlink.Nest(b, nl.CTA_PROTOINFO_TCP, func(b []byte) []byte {
			flags := []byte{tcpSACK | tcpBeLiberal, tcpSACK | tcpBeLiberal} // struct nf_ct_tcp_flags: flags, mask
			b = netlink.Attr(b, nl.CTA_PROTOINFO_TCP_STATE, []byte{tcpEstablished})
			b = netlink.Attr(b, nl.CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, flags)
			return netlink.Attr(b, nl.CTA_PROTOINFO_TCP_FLAGS_REPLY, flags)
		})
	})
	return netlink.End(b, start)
}

// appendTuple appends the tuple of a direction.
func appendTuple(b []byte, direction uint16, protocol inet.Protocol, source, destination netip.AddrPort) []byte {
	src, dst := uint16(nl.CTA_IP_V4_SRC), uint16(nl.CTA_IP_V4_DST)
	if inet.FamilyOf(destination.Addr()) == inet.IPv6 {
		src, dst = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	return netlink.Nest(b, direction, func(b []byte) []byte {
		b = netlink.Nest(b, nl.CTA_TUPLE_IP, func(b []byte) []byte {
			b = netlink.Attr(b, src, source.Addr().AsSlice())
			return netlink.Attr(b, dst, destination.Addr().AsSlice())
		})
		return netlink.Nest(b, nl.CTA_TUPLE_PROTO, func(b []byte) []byte {
			b = netlink.Attr(b, nl.CTA_PROTO_NUM, []byte{uint8(protocol)})
			b = netlink.Attr(b, nl.CTA_PROTO_SRC_PORT, binary.BigEndian.AppendUint16(nil, source.Port()))
			return netlink.Attr(b, nl.CTA_PROTO_DST_PORT, binary.BigEndian.AppendUint16(nil, destination.Port()))
		})
	})
}

// tuple is one direction of an entry.
type tuple struct {
	src, dst         netip.Addr
	srcPort, dstPort uint16
	protocol         inet.Protocol
	zone             uint16
}

// parseFlow parses a message about an entry, without the netlink header.
func parseFlow(b []byte) (Flow, error) {
	var f Flow
	if len(b) < genericLen {
		return f, errShort
	}
	var orig, reply tuple
	err := netlink.EachAttr(b[genericLen:], func(kind uint16, v []byte) (err error) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			orig, err = parseTuple(v)
		case nl.CTA_TUPLE_REPLY:
			reply, err = parseTuple(v)
		case attrID:
			if len(v) < 4 {
				return errShort
			}
			f.ID = binary.BigEndian.Uint32(v)
		case attrZone:
			f.Zone, err = parseUint16(v)
		case attrStatus:
			if len(v) < 4 {
				return errShort
			}
			f.Answered = binary.BigEndian.Uint32(v)&seenReply != 0
		}
		return err
	})
	f.Protocol = orig.protocol
	f.Source = netip.AddrPortFrom(orig.src, orig.srcPort)
	f.Destination = netip.AddrPortFrom(orig.dst, orig.dstPort)
	f.Replies = netip.AddrPortFrom(reply.src, reply.srcPort)
	f.Seen = netip.AddrPortFrom(reply.dst, reply.dstPort)
	// The kernel reports the zone of the entry or of one direction. Any zone but 0
	// belongs to other software.
	f.Zone |= orig.zone | reply.zone
	if err == nil && (!orig.src.IsValid() || !orig.dst.IsValid() || !reply.src.IsValid()) {
		err = errors.New("parse entry: it has no addresses")
	}
	return f, err
}

func parseTuple(b []byte) (t tuple, err error) {
	err = netlink.EachAttr(b, func(kind uint16, v []byte) (err error) {
		switch kind {
		case nl.CTA_TUPLE_IP:
			return t.parseAddresses(v)
		case nl.CTA_TUPLE_PROTO:
			return t.parsePorts(v)
		case attrTupleZone:
			t.zone, err = parseUint16(v)
		}
		return err
	})
	return t, err
}

func (t *tuple) parseAddresses(b []byte) error {
	return netlink.EachAttr(b, func(kind uint16, v []byte) error {
		a, ok := netip.AddrFromSlice(v)
		if !ok {
			return fmt.Errorf("parse entry: an address of %d bytes", len(v))
		}
		switch kind {
		case nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC:
			t.src = a
		case nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST:
			t.dst = a
		}
		return nil
	})
}

// parsePorts parses the protocol, and the ports if the protocol has any.
func (t *tuple) parsePorts(b []byte) error {
	return netlink.EachAttr(b, func(kind uint16, v []byte) (err error) {
		switch kind {
		case nl.CTA_PROTO_NUM:
			if len(v) < 1 {
				return errShort
			}
			t.protocol = inet.Protocol(v[0])
		case nl.CTA_PROTO_SRC_PORT:
			t.srcPort, err = parseUint16(v)
		case nl.CTA_PROTO_DST_PORT:
			t.dstPort, err = parseUint16(v)
		}
		return err
	})
}

var errShort = errors.New("parse entry: too short")

func parseUint16(v []byte) (uint16, error) {
	if len(v) < 2 {
		return 0, errShort
	}
	return binary.BigEndian.Uint16(v), nil
}
