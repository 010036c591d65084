// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"strings"

	netutils "k8s.io/utils/net"
)

// ParseAddr reads an address of a configuration as upstream does: numbers of IPv4
// may begin with zeros, which say nothing, and there are no zones.
func ParseAddr(text string) (netip.Addr, error) {
	a, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(text))
	if !ok {
		return a, fmt.Errorf("%q is not an IP address", text)
	}
	return a.Unmap(), nil
}

// ParseCIDR reads a CIDR of a configuration, as ParseAddr does, and takes off the bits
// behind the prefix.
func ParseCIDR(text string) (netip.Prefix, error) {
	_, n, err := netutils.ParseCIDRSloppy(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not a CIDR", text)
	}
	a, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	if a.Is4In6() {
		return netip.Prefix{}, fmt.Errorf("%q is IPv4 inside of IPv6", text)
	}
	return netip.PrefixFrom(a, bits), nil
}

// parseStoredAddr reads an address of an API object. API servers before 1.36 accept numbers
// with leading zeros, and upstream ignores those zeros: zeros says that there are some. An
// IPv4-mapped address stays one.
func parseStoredAddr(text string) (a netip.Addr, zeros bool, err error) {
	if a, err = netip.ParseAddr(text); err == nil {
		return a, false, nil
	}
	if a, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(text)); ok {
		if !strings.Contains(text, ":") {
			a = a.Unmap()
		}
		return a, true, nil
	}
	return netip.Addr{}, false, err
}

// parseStoredCIDR is parseStoredAddr for a CIDR; it clears the bits after the prefix.
func parseStoredCIDR(text string) (p netip.Prefix, zeros bool, err error) {
	if p, err = netip.ParsePrefix(text); err != nil {
		p, err = ParseCIDR(text)
		zeros = err == nil
	}
	if err != nil || p.Addr().Is4In6() {
		return netip.Prefix{}, false, fmt.Errorf("%q is not a CIDR", text)
	}
	return p.Masked(), zeros, nil
}

// leadingZeros is the warning about an object with leading zeros in addresses or ranges: one,
// however many there are.
type leadingZeros struct {
	field, text, read string // of the first
	more              int
}

// add has the field as a format and its arguments.
func (z *leadingZeros) add(text string, read fmt.Stringer, field string, args ...any) {
	if z.field != "" {
		z.more++
		return
	}
	z.field, z.text, z.read = fmt.Sprintf(field, args...), text, read.String()
}

// message is empty if there is nothing to warn about.
func (z *leadingZeros) message() string {
	switch {
	case z.field == "":
		return ""
	case z.more == 0:
		return fmt.Sprintf("%q has leading zeros; it is read as %s", z.text, z.read)
	}
	return fmt.Sprintf("%q has leading zeros; it is read as %s, and %d more are read in this way", z.text, z.read, z.more)
}
