// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/netlink"
)

// run interprets bytecode as the kernel does. This includes its check that every jump target is
// reachable by "yes" distances alone.
func run(code []byte, family byte, dst netip.AddrPort) (accept bool, err error) {
	onPath := map[int]bool{}
	pc := 0
	for pc < len(code) {
		onPath[pc] = true
		pc += int(code[pc+1])
	}
	if pc != len(code) {
		return false, fmt.Errorf("the path of yes distances ends at %d of %d", pc, len(code))
	}
	onPath[len(code)], onPath[len(code)+4] = true, true
	for pc = 0; pc < len(code); {
		yes := false
		if code[pc] == opDCond {
			bits := int(code[pc+5])
			port := int32(binary.NativeEndian.Uint32(code[pc+8:]))
			a, _ := netip.AddrFromSlice(code[pc+12 : pc+12+bits/8])
			same := code[pc+4] == family || family == unix.AF_INET6 && code[pc+4] == unix.AF_INET && dst.Addr().Is4()
			yes = same && a == dst.Addr() && (port == -1 || port == int32(dst.Port()))
		}
		no := int(binary.NativeEndian.Uint16(code[pc+2:]))
		if !onPath[pc+no] {
			return false, fmt.Errorf("jump from %d to %d is not on the path of yes distances", pc, pc+no)
		}
		if yes {
			pc += int(code[pc+1])
		} else {
			pc += no
		}
	}
	return pc == len(code), nil
}

func TestBytecode(t *testing.T) {
	ap := netip.MustParseAddrPort
	for _, tc := range []struct {
		name     string
		remote   []netip.AddrPort
		yes, not []string
	}{
		{name: "one", remote: []netip.AddrPort{ap("10.0.0.1:53")},
			yes: []string{"10.0.0.1:53"}, not: []string{"10.0.0.1:54", "10.0.0.2:53", "[fd00::1]:53"}},
		{name: "any port", remote: []netip.AddrPort{ap("10.0.0.1:0")},
			yes: []string{"10.0.0.1:1", "10.0.0.1:65535"}, not: []string{"10.0.0.2:1"}},
		{name: "mapped is the same as plain", remote: []netip.AddrPort{ap("[::ffff:10.0.0.1]:53")},
			yes: []string{"10.0.0.1:53"}, not: []string{"10.0.0.2:53"}},
		{name: "mixed", remote: []netip.AddrPort{ap("[fd00::1]:53"), ap("10.0.0.1:53"), ap("[fd00::2]:54")},
			yes: []string{"[fd00::1]:53", "10.0.0.1:53", "[fd00::2]:54"}, not: []string{"[fd00::1]:54", "[fd00::2]:53"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			code := bytecode(tc.remote)
			check := func(list []string, want bool) {
				for _, s := range list {
					dst := ap(s)
					families := []byte{unix.AF_INET6}
					if dst.Addr().Is4() {
						families = []byte{unix.AF_INET, unix.AF_INET6}
					}
					for _, family := range families {
						if got, err := run(code, family, dst); err != nil || got != want {
							t.Errorf("family %d, %s: got %v, %v; want %v", family, s, got, err, want)
						}
					}
				}
			}
			check(tc.yes, true)
			check(tc.not, false)
		})
	}
}

func TestBytecodeAtItsLimit(t *testing.T) {
	var remote []netip.AddrPort
	for i := range maxBytecode {
		remote = append(remote, netip.AddrPortFrom(netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(i)}), uint16(1+i)))
	}
	code := bytecode(remote)
	for _, r := range remote {
		if ok, err := run(code, unix.AF_INET6, r); !ok || err != nil {
			t.Errorf("%s: got %v, %v", r, ok, err)
		}
	}
	if f := (Filter{Remote: remote}); f.matcher() != nil {
		t.Error("both the kernel and user space filter")
	}
}

func TestMatcher(t *testing.T) {
	f := Filter{Remote: make([]netip.AddrPort, maxBytecode)}
	f.Remote = append(f.Remote, netip.MustParseAddrPort("[::ffff:10.0.0.1]:53"), netip.MustParseAddrPort("10.0.0.2:0"))
	match := f.matcher()
	for s, want := range map[string]bool{
		"10.0.0.1:53": true, "10.0.0.1:54": false, "10.0.0.2:7": true, "[fd00::1]:53": false,
	} {
		if got := match(netip.MustParseAddrPort(s)); got != want {
			t.Errorf("%s: got %v, want %v", s, got, want)
		}
	}
}

func TestFamilies(t *testing.T) {
	ap := netip.MustParseAddrPort
	for _, tc := range []struct {
		remote []netip.AddrPort
		want   []uint8
	}{
		{nil, []uint8{unix.AF_INET, unix.AF_INET6}},
		{[]netip.AddrPort{ap("10.0.0.1:1")}, []uint8{unix.AF_INET, unix.AF_INET6}},
		{[]netip.AddrPort{ap("[::ffff:10.0.0.1]:1")}, []uint8{unix.AF_INET, unix.AF_INET6}},
		{[]netip.AddrPort{ap("[fd00::1]:1")}, []uint8{unix.AF_INET6}},
	} {
		if d := cmp.Diff(tc.want, families(tc.remote)); d != "" {
			t.Errorf("%v (-want +got):\n%s", tc.remote, d)
		}
	}
}

// message builds the kernel's message about a socket with IPv4-mapped addresses.
func message() []byte {
	b := []byte{unix.AF_INET6, Established, 0, 0}
	var id sockID
	binary.BigEndian.PutUint16(id[0:], 40000)
	binary.BigEndian.PutUint16(id[2:], 53)
	copy(id[4:], netip.MustParseAddr("::ffff:10.0.0.9").AsSlice())
	copy(id[20:], netip.MustParseAddr("::ffff:10.0.0.1").AsSlice())
	binary.NativeEndian.PutUint32(id[40:], 0x11223344)
	binary.NativeEndian.PutUint32(id[44:], 0x55667788)
	b = append(b, id[:]...)
	b = append(b, make([]byte, 16)...)
	b = binary.NativeEndian.AppendUint32(b, 4711)
	b = netlink.Attr(b, 8, []byte{3}) // INET_DIAG_SHUTDOWN: ignored
	one := [sockaddrStorage]byte{4: 10, 7: 9}
	binary.NativeEndian.PutUint16(one[:], unix.AF_INET)
	two := [sockaddrStorage]byte{8: 0xfd, 23: 2}
	binary.NativeEndian.PutUint16(two[:], unix.AF_INET6)
	b = netlink.Attr(b, attrLocals, append(one[:], two[:]...))
	return netlink.Attr(b, attrCgroupID, binary.NativeEndian.AppendUint64(nil, 99))
}

func TestParseSocket(t *testing.T) {
	got, err := parseSocket(message())
	if err != nil {
		t.Fatal(err)
	}
	got.id = sockID{}
	want := Socket{
		Family: unix.AF_INET6, State: Established,
		Local: netip.MustParseAddrPort("10.0.0.9:40000"), Remote: netip.MustParseAddrPort("10.0.0.1:53"),
		Locals: []netip.Addr{netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("fd00::2")},
		Cookie: 0x5566778811223344, Inode: 4711, CgroupID: 99,
	}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.AllowUnexported(Socket{})); d != "" {
		t.Errorf("socket (-want +got):\n%s", d)
	}
}

func FuzzParseSocket(f *testing.F) {
	f.Add(message())
	f.Add(message()[:messageLen])
	f.Add(message()[:messageLen+3])
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := parseSocket(b)
		if err == nil && len(b) < messageLen {
			t.Errorf("parsed %+v from %d bytes", s, len(b))
		}
	})
}
