// SPDX-License-Identifier: Apache-2.0

package klipperlb

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// Environment is what the variables say.
type Environment struct {
	// Sources are the destination addresses that packets have to have, by family; none for any (SRC_IPS).
	Sources [inet.Families][]netip.Addr
	// Port is where packets arrive (SRC_PORT), Protocol their protocol (DEST_PROTO), TargetPort where they go to (DEST_PORT).
	Port, TargetPort uint16
	Protocol         string
	// Targets are the addresses that they go to, by family (DEST_IPS).
	Targets [inet.Families][]netip.Addr
	// Ranges are the sources that are admitted, by family (SRC_RANGES).
	Ranges [inet.Families][]netip.Prefix
}

// Wanted reports whether the variables of klipper-lb are set, without which no process is meant to be one.
func Wanted(lookup func(string) (string, bool)) bool {
	return !slices.ContainsFunc([]string{"SRC_PORT", "DEST_PROTO", "DEST_PORT", "DEST_IPS"}, func(name string) bool {
		_, set := lookup(name)
		return !set
	})
}

// Read reads the variables. The error names each one that is wrong.
func Read(lookup func(string) (string, bool)) (e Environment, err error) {
	var errs []error
	get := func(name string) string {
		value, _ := lookup(name)
		return strings.TrimSpace(value)
	}
	bad := func(name, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s=%.64q: %s", name, get(name), fmt.Sprintf(format, args...)))
	}
	port := func(name string) uint16 {
		n, err := strconv.ParseUint(get(name), 10, 16)
		if err != nil || n == 0 {
			bad(name, "want a port from 1 to 65535")
		}
		return uint16(n)
	}
	e.Port, e.TargetPort = port("SRC_PORT"), port("DEST_PORT")
	if e.Protocol = strings.ToLower(get("DEST_PROTO")); !slices.Contains([]string{"tcp", "udp", "sctp"}, e.Protocol) {
		bad("DEST_PROTO", "want TCP, UDP or SCTP")
	}
	addresses := func(name string) (list [inet.Families][]netip.Addr) {
		for _, part := range fields(get(name)) {
			a, err := netip.ParseAddr(part)
			if err != nil || a.Zone() != "" {
				bad(name, "%.64q is not an address", part)
				continue
			}
			a = a.Unmap()
			list[inet.FamilyOf(a)] = append(list[inet.FamilyOf(a)], a)
		}
		return list
	}
	e.Targets, e.Sources = addresses("DEST_IPS"), addresses("SRC_IPS")
	if len(fields(get("DEST_IPS"))) == 0 {
		bad("DEST_IPS", "want one address or more, separated by commas")
	}
	if _, set := lookup("SRC_RANGES"); !set {
		e.Ranges = [inet.Families][]netip.Prefix{{netip.MustParsePrefix("0.0.0.0/0")}, {netip.MustParsePrefix("::/0")}}
	}
	for _, part := range fields(get("SRC_RANGES")) {
		p, err := netip.ParsePrefix(part)
		if err != nil {
			bad("SRC_RANGES", "%.64q is not a CIDR", part)
			continue
		}
		e.Ranges[inet.FamilyOf(p.Addr())] = append(e.Ranges[inet.FamilyOf(p.Addr())], p.Masked())
	}
	return e, errors.Join(errs...)
}

func fields(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
}
