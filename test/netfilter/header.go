// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// bits128 is an address as two words, IPv4 in its mapped form, so that masks need
// no loop.
type bits128 [2]uint64

func wordsOf(a netip.Addr) bits128 {
	b := a.As16()
	return bits128{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func (w bits128) addr() netip.Addr {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], w[0])
	binary.BigEndian.PutUint64(b[8:], w[1])
	return netip.AddrFrom16(b)
}

// and returns the masked address.
func (w bits128) and(mask bits128) bits128 { return bits128{w[0] & mask[0], w[1] & mask[1]} }

// addresses matches addresses that equal one under a mask, whose bits need not be
// contiguous. The zero value matches all.
type addresses struct {
	addr, mask bits128
	not        bool
}

func (a addresses) contain(w bits128) bool { return (w.and(a.mask) == a.addr) != a.not }

// parseAddresses parses ADDRESS, ADDRESS/BITS or ADDRESS/MASK.
func parseAddresses(f proxier.Family, s string, not bool) (addresses, error) {
	fail := func() (addresses, error) { return addresses{}, fmt.Errorf("%s address %q", f, s) }
	base, mask, masked := strings.Cut(s, "/")
	addr, err := netip.ParseAddr(base)
	if err != nil || addr.Zone() != "" || proxier.FamilyOf(addr) != f {
		return fail()
	}
	m := ones(f, addr.BitLen())
	if masked {
		if n, err := strconv.ParseUint(mask, 10, 8); err == nil && int(n) <= addr.BitLen() {
			m = ones(f, int(n))
		} else if long, err := netip.ParseAddr(mask); err == nil && proxier.FamilyOf(long) == f {
			m = wordsOf(long).and(ones(f, addr.BitLen()))
		} else {
			return fail()
		}
	}
	if m == (bits128{}) && not {
		return addresses{}, fmt.Errorf("! %s is never true", s)
	}
	return addresses{addr: wordsOf(addr).and(m), mask: m, not: not}, nil
}

// ones returns the mask with that many leading bits. For IPv4, it excludes the first 96
// bits, which are equal in all addresses.
func ones(f proxier.Family, n int) bits128 {
	if f == proxier.IPv4 {
		return bits128{0, uint64(^uint32(0)) &^ (1<<(32-n) - 1)}
	}
	left := func(n int) uint64 { return ^(^uint64(0) >> n) } // a shift by 64 leaves nothing
	return bits128{left(min(n, 64)), left(max(n-64, 0))}
}

// option returns the option as saved.
func (a addresses) option(name string, f proxier.Family) string {
	if a.mask == (bits128{}) {
		return ""
	}
	n := bits.OnesCount64(a.mask[0]) + bits.OnesCount64(a.mask[1])
	mask := strconv.Itoa(n)
	if a.mask != ones(f, n) {
		mask = addrText(a.mask, f)
	}
	return negated(a.not) + name + " " + addrText(a.addr, f) + "/" + mask
}

// addrText formats an address as inet_ntop does: if all but the last 32 bits are zero, it
// uses dotted notation for these (IPv4-compatible addresses).
func addrText(w bits128, f proxier.Family) string {
	low := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, uint32(w[1]))))
	switch {
	case f == proxier.IPv4:
		return low.String()
	case w[0] == 0 && w[1]>>32 == 0 && w[1]>>16 != 0:
		return "::" + low.String()
	}
	return w.addr().String()
}

func negated(not bool) string {
	if not {
		return "! "
	}
	return ""
}

// device matches a device by its name or a prefix of it. The zero value matches all.
type device struct {
	name        string
	prefix, not bool
}

// deviceLength is the maximum length of a device name.
const deviceLength = 15

func parseDevice(s string, not bool) (device, error) {
	if s == "" || len(s) > deviceLength {
		return device{}, fmt.Errorf("device %q", s)
	}
	name, prefix := strings.CutSuffix(s, "+")
	if name == "" && not {
		return device{}, errors.New("! + is never true")
	}
	return device{name: name, prefix: prefix, not: not}, nil
}

func (d device) is(name string) bool {
	if d.name == "" {
		return true
	}
	return (name == d.name || d.prefix && strings.HasPrefix(name, d.name)) != d.not
}

func (d device) option(name string) string {
	switch {
	case d.name == "":
		return ""
	case d.prefix:
		return negated(d.not) + name + " " + d.name + "+"
	}
	return negated(d.not) + name + " " + d.name
}

// Protocols besides those of Services.
const (
	ICMP   proxier.Protocol = 1
	ICMPv6 proxier.Protocol = 58
)

// protocols have their names as saved, and the matches for their headers.
var protocols = []struct {
	number      proxier.Protocol
	name, match string
}{
	{proxier.TCP, "tcp", "tcp"}, {proxier.UDP, "udp", "udp"}, {proxier.SCTP, "sctp", "sctp"},
	{ICMP, "icmp", "icmp"}, {ICMPv6, "ipv6-icmp", "icmp6"}, {ICMPv6, "icmpv6", "icmp6"},
}

// protocol matches a protocol. The zero value matches all.
type protocol struct {
	number proxier.Protocol
	not    bool
}

func parseProtocol(s string, not bool) (protocol, error) {
	number, _ := strconv.ParseUint(s, 10, 8)
	for _, p := range protocols {
		if s == p.name || proxier.Protocol(number) == p.number {
			return protocol{number: p.number, not: not}, nil
		}
	}
	if (s == "all" || s == "0") && !not {
		return protocol{}, nil
	}
	return protocol{}, fmt.Errorf("unknown protocol %q", s)
}

func (p protocol) is(number proxier.Protocol) bool {
	return p.number == 0 || (number == p.number) != p.not
}

// exactly reports whether only this protocol matches.
func (p protocol) exactly(number proxier.Protocol) bool { return p.number == number && !p.not }

// ports reports whether all matching packets have ports.
func (p protocol) ports() bool {
	return !p.not && (p.number == proxier.TCP || p.number == proxier.UDP || p.number == proxier.SCTP)
}

// match returns the protocol's match, which rules need not load with -m.
func (p protocol) match() string {
	for _, q := range protocols {
		if p.exactly(q.number) {
			return q.match
		}
	}
	return ""
}

func (p protocol) String() string {
	for _, q := range protocols {
		if q.number == p.number {
			return negated(p.not) + "-p " + q.name
		}
	}
	return ""
}
