// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/netlink"
)

// Constants of include/uapi/linux/{sock_diag,inet_diag}.h that x/sys/unix lacks.
const (
	msgByFamily = 20 // SOCK_DIAG_BY_FAMILY
	msgDestroy  = 21 // SOCK_DESTROY

	reqAttrBytecode = 1 // INET_DIAG_REQ_BYTECODE

	attrInfo     = 2  // INET_DIAG_INFO
	attrV6Only   = 11 // INET_DIAG_SKV6ONLY
	attrLocals   = 12 // INET_DIAG_LOCALS
	attrCgroupID = 21 // INET_DIAG_CGROUP_ID

	opJump  = 1 // INET_DIAG_BC_JMP
	opDCond = 8 // INET_DIAG_BC_D_COND

	requestLen = 8 + len(sockID{}) // struct inet_diag_req_v2
	messageLen = 4 + len(sockID{}) + 20

	sockaddrStorage = 128 // sizeof(struct sockaddr_storage)
)

// sockID is struct inet_diag_sockid, byte for byte: ports and addresses in network
// order, the rest in host order.
//
//	0 sport  2 dport  4 src[16]  20 dst[16]  36 interface  40 cookie[8]
type sockID [48]byte

func (id *sockID) local(family uint8) netip.AddrPort {
	return addrPort(family, id[4:20], binary.BigEndian.Uint16(id[0:]))
}

func (id *sockID) remote(family uint8) netip.AddrPort {
	return addrPort(family, id[20:36], binary.BigEndian.Uint16(id[2:]))
}

// cookie is a 64-bit number in two halves, the low one first.
func (id *sockID) cookie() uint64 {
	return uint64(binary.NativeEndian.Uint32(id[40:])) | uint64(binary.NativeEndian.Uint32(id[44:]))<<32
}

func addrPort(family uint8, b []byte, port uint16) netip.AddrPort {
	if family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[:4])), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(b)).Unmap(), port)
}

// request appends struct inet_diag_req_v2.
func request(b []byte, family, protocol, extensions uint8, states uint32, id *sockID) []byte {
	b = append(b, family, protocol, extensions, 0)
	b = binary.NativeEndian.AppendUint32(b, states)
	return append(b, id[:]...)
}

// dumpRequest builds the request for one family.
func dumpRequest(family uint8, f Filter, seq uint32) []byte {
	b := netlink.Begin(nil, msgByFamily, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, seq)
	var extensions uint8
	if f.Info && f.Protocol == unix.IPPROTO_TCP {
		extensions |= 1 << (attrInfo - 1)
	}
	b = request(b, family, f.Protocol, extensions, f.states(), &sockID{})
	if n := len(f.Remote); n > 0 && n <= maxBytecode {
		b = netlink.Attr(b, reqAttrBytecode, bytecode(f.Remote))
	}
	return netlink.End(b, 0)
}

// bytecode returns a filter that accepts a socket if one of the remote addresses matches:
//
//	cond r0   no: skip the jump
//	jump end
//	cond r1   no: skip the jump
//	jump end
//	cond rN   no: jump beyond the end, which means reject
//	end
//
// Each operation jumps by its "yes" (8 bit) or its "no" (16 bit) distance. The kernel
// requires that every target is also reachable by "yes" distances alone, so a jump has
// its "no" distance to the end and its "yes" distance to the next condition. An IPv4
// condition also matches the mapped address on an IPv6 socket.
func bytecode(remote []netip.AddrPort) []byte {
	const opLen, hostLen = 4, 8
	sizes, total := make([]int, len(remote)), 0
	for i, r := range remote {
		sizes[i] = opLen + hostLen + r.Addr().Unmap().BitLen()/8
		total += sizes[i] + opLen
	}
	total -= opLen // no jump after the last condition

	b := make([]byte, 0, total)
	for i, r := range remote {
		a := r.Addr().Unmap()
		family, port := byte(unix.AF_INET), int32(r.Port())
		if a.Is6() {
			family = unix.AF_INET6
		}
		if port == 0 {
			port = -1 // any
		}
		b = append(b, opDCond, byte(sizes[i]))
		b = binary.NativeEndian.AppendUint16(b, uint16(sizes[i]+opLen))
		// struct inet_diag_hostcond
		b = append(b, family, byte(a.BitLen()), 0, 0)
		b = binary.NativeEndian.AppendUint32(b, uint32(port))
		b = append(b, a.AsSlice()...)
		if i < len(remote)-1 {
			b = append(b, opJump, opLen)
			b = binary.NativeEndian.AppendUint16(b, uint16(total-(len(b)-2)))
		}
	}
	return b
}

// parseSocket parses struct inet_diag_msg and the attributes after it.
func parseSocket(b []byte) (Socket, error) {
	if len(b) < messageLen {
		return Socket{}, fmt.Errorf("parse socket: %d bytes are too short", len(b))
	}
	s := Socket{Family: b[0], State: b[1], id: sockID(b[4:])}
	s.Local, s.Remote, s.Cookie = s.id.local(s.Family), s.id.remote(s.Family), s.id.cookie()
	s.Inode = binary.NativeEndian.Uint32(b[messageLen-4:])
	err := netlink.EachAttr(b[messageLen:], func(kind uint16, v []byte) error {
		switch {
		case kind == attrCgroupID && len(v) == 8:
			s.CgroupID = binary.NativeEndian.Uint64(v)
		case kind == attrV6Only && len(v) > 0:
			s.V6Only = v[0] != 0
		case kind == attrLocals:
			s.Locals = parseLocals(v)
		case kind == attrInfo && len(v) > 0: // older kernels have less of it
			s.TCP = &unix.TCPInfo{}
			copy(unsafe.Slice((*byte)(unsafe.Pointer(s.TCP)), unsafe.Sizeof(*s.TCP)), v)
		}
		return nil
	})
	return s, err
}

// parseLocals parses an array of struct sockaddr_storage.
func parseLocals(b []byte) (list []netip.Addr) {
	for ; len(b) >= sockaddrStorage; b = b[sockaddrStorage:] {
		switch binary.NativeEndian.Uint16(b) {
		case unix.AF_INET: // struct sockaddr_in: family, port, address
			list = append(list, netip.AddrFrom4([4]byte(b[4:8])))
		case unix.AF_INET6: // struct sockaddr_in6: family, port, flow label, address
			list = append(list, netip.AddrFrom16([16]byte(b[8:24])).Unmap())
		}
	}
	return list
}
