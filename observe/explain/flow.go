// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// maxDevice is the maximum length of a device name.
const maxDevice = 15

// ParseFlow parses a flow. The source is an address with an optional port, the destination
// has both. An empty protocol means TCP. An empty device means that this host sends the flow.
func ParseFlow(source, destination, protocol, device string) (flow proxier.Flow, err error) {
	if flow.Source, err = parseSource(source); err != nil {
		return flow, fmt.Errorf("source %q: %w", source, err)
	}
	if flow.Destination, err = parseAddrPort(destination); err != nil {
		return flow, fmt.Errorf("destination %q: %w", destination, err)
	}
	if flow.Destination.Port() == 0 {
		return flow, fmt.Errorf("destination %q: want a port from 1 to 65535", destination)
	}
	if from, to := flow.Source.Addr(), flow.Destination.Addr(); from.Is4() != to.Is4() {
		return flow, fmt.Errorf("source %s and destination %s have different address families", from, to)
	}
	if flow.Protocol, err = proxier.ParseProtocol(v1.Protocol(strings.ToUpper(protocol))); err != nil {
		return flow, fmt.Errorf("unknown protocol %q: want tcp, udp or sctp", protocol)
	}
	if len(device) > maxDevice || strings.ContainsAny(device, "/ \t\r\n\x00") {
		return flow, fmt.Errorf("%.20q is not the name of a network device", device)
	}
	flow.Device = device
	return flow, nil
}

// SplitDestination splits ADDRESS:PORT/PROTOCOL; the protocol is optional.
func SplitDestination(text string) (addrPort, protocol string, err error) {
	addrPort, protocol, given := strings.Cut(text, "/")
	if given && protocol == "" {
		return "", "", fmt.Errorf("destination %q: want tcp, udp or sctp after the slash", text)
	}
	return addrPort, protocol, nil
}

func parseSource(text string) (netip.AddrPort, error) {
	bare := text
	if inner, ok := strings.CutPrefix(text, "["); ok && strings.HasSuffix(inner, "]") {
		bare = strings.TrimSuffix(inner, "]")
	}
	if a, err := netip.ParseAddr(bare); err == nil {
		return usable(netip.AddrPortFrom(a, 0))
	}
	a, err := parseAddrPort(text)
	if err != nil {
		return a, errors.New("want an IP address and optionally a port: 10.244.1.7, 10.244.1.7:40000, [fd00::7]:40000")
	}
	return a, nil
}

func parseAddrPort(text string) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(text)
	if err != nil {
		if _, err := netip.ParseAddr(text); err == nil {
			return a, errors.New("want a port too, as in 10.96.0.10:80 or [fd00::10]:80")
		}
		return a, errors.New("want an IP address and a port, as in 10.96.0.10:80 or [fd00::10]:80")
	}
	return usable(a)
}

// usable unmaps IPv4-mapped addresses, as sockets do.
func usable(a netip.AddrPort) (netip.AddrPort, error) {
	if a.Addr().Zone() != "" {
		return a, errors.New("want an address without a zone")
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
}
