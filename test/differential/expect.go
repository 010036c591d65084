// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// expect reads "pod,host -> web,web.dns:lb : a b masqueraded sticky=10": every client, and every
// destination. Instead of endpoints there can be reject, drop or pass.
func (s *Story) expect(call, result, at string) error {
	from, to, ok := strings.Cut(call, " -> ")
	if !ok {
		return fmt.Errorf("unknown line %q", call)
	}
	for _, client := range strings.Split(from, ",") {
		for _, destination := range strings.Split(to, ",") {
			e := Expectation{Text: at + ": " + client + " -> " + destination}
			var err error
			if e.Flow, err = s.flow(client, destination); err != nil {
				return err
			}
			for _, w := range strings.Fields(result) {
				seconds, sticky := strings.CutPrefix(w, "sticky=")
				switch {
				case w == "reject":
					e.Outcome = proxier.Rejected
				case w == "drop":
					e.Outcome = proxier.Dropped
				case w == "pass":
					e.Outcome = proxier.Pass
				case w == "masqueraded":
					e.Hidden = true
				case sticky:
					n, err := strconv.Atoi(seconds)
					if err != nil {
						return err
					}
					e.Affinity = time.Duration(n) * time.Second
				case s.pods[w].IsValid():
					e.Outcome = proxier.Forward
					e.Backends = append(e.Backends, s.pods[w])
				default:
					return fmt.Errorf("unknown endpoint %q", w)
				}
			}
			s.step().Expectations = append(s.step().Expectations, e)
		}
	}
	return nil
}

// client returns the address of a client: pod and pod2 (of another node), host, localhost, node2, outside,
// blocked (outside as well), an endpoint, or an address of a Service that a device here has.
func (s *Story) client(name string) (a netip.Addr, device string, err error) {
	switch name {
	case "pod":
		return s.addr("10.244.1.250", "fd00:10:244:1::fa"), "pod1", nil
	case "pod2":
		return s.addr("10.244.2.250", "fd00:10:244:2::fa"), "eth0", nil
	case "host":
		return s.Facts.NodeIPs[s.family], "", nil
	case "localhost":
		return s.addr("127.0.0.1", "::1"), "", nil
	case "node2":
		return s.addr("172.18.0.2", "fd00:18::2"), "eth0", nil
	case "outside":
		return s.addr("198.51.100.1", "2001:db8:51:100::1"), "eth0", nil
	case "blocked":
		return s.addr("198.51.100.200", "2001:db8:51:100::c8"), "eth0", nil
	}
	if a, ok := s.pods[name]; ok {
		if device = "eth0"; s.prefix("10.244.1.0/24", "fd00:10:244:1::/64").Contains(a) {
			device = "pod1"
		}
		return a, device, nil
	}
	if service, kind, ok := strings.Cut(name, ":"); ok {
		if a, ok := s.vip(service, kind); ok {
			return a, "eth0", nil
		}
	}
	return a, "", fmt.Errorf("unknown client %q", name)
}

// destination reads web.dns:lb: a Service, the name of its port, which is the first one if it is
// missing, and the kind of address: ip, which is the default, lb, lb2, external; or node, second,
// localhost, node2 for the NodePort at an address of a node. web#81/udp is a port that it does not
// have.
func (s *Story) destination(text string) (to netip.AddrPort, protocol proxier.Protocol, err error) {
	text, number, other := strings.Cut(text, "#")
	name, kind, _ := strings.Cut(text, ":")
	name, port, _ := strings.Cut(name, ".")
	ports, ok := s.ports[name]
	if !ok {
		return to, 0, fmt.Errorf("unknown Service %q", name)
	}
	p := ports[0]
	for _, o := range ports {
		if o.Name == port {
			p = o
		}
	}
	if port != "" && p.Name != port {
		return to, 0, fmt.Errorf("unknown port of %q", text)
	}
	n := uint16(p.Port)
	if kind == "" {
		kind = "ip"
	}
	a, isVIP := s.vip(name, kind)
	if !isVIP {
		if n = uint16(p.NodePort); n == 0 {
			n = uint16(30000 + 100*s.number(name))
		}
		switch kind {
		case "node":
			a = s.Facts.NodeIPs[s.family]
		case "second":
			a = s.addr("172.18.1.1", "fd00:18::1:1")
		case "localhost":
			a = s.addr("127.0.0.1", "::1")
		case "node2":
			a = s.addr("172.18.0.2", "fd00:18::2")
		default:
			return to, 0, fmt.Errorf("unknown address of %q", text)
		}
	}
	word := string(p.Protocol)
	if other {
		digits, w, _ := strings.Cut(number, "/")
		if w != "" {
			word = strings.ToUpper(w)
		}
		if digits != "" {
			i, err := strconv.ParseUint(digits, 10, 16)
			if err != nil {
				return to, 0, err
			}
			n = uint16(i)
		}
	}
	protocol, err = proxier.ParseProtocol(v1.Protocol(word))
	return netip.AddrPortFrom(a, n), protocol, err
}

func (s *Story) flow(client, destination string) (f proxier.Flow, err error) {
	a, device, err := s.client(client)
	if err != nil {
		return f, err
	}
	f.Source, f.Device = netip.AddrPortFrom(a, 40000), device
	f.Destination, f.Protocol, err = s.destination(destination)
	return f, err
}

// udp reads "outside -> web:lb => a : kept", where the entry leads to endpoint a, or with => - is
// not translated.
func (s *Story) udp(call, result, at string) error {
	from, rest, _ := strings.Cut(call, " -> ")
	to, endpoints, ok := strings.Cut(rest, " => ")
	if !ok || result != "kept" && result != "gone" {
		return fmt.Errorf("unknown line %q", call)
	}
	for _, destination := range strings.Split(to, ",") {
		for _, endpoint := range strings.Split(endpoints, ",") {
			f, err := s.flow(from, destination)
			if err != nil {
				return err
			}
			replies := f.Destination
			if endpoint != "-" {
				name, number, _ := strings.Cut(endpoint, "#")
				a, ok := s.pods[name]
				if !ok {
					return fmt.Errorf("unknown endpoint %q", endpoint)
				}
				port := uint64(8080)
				if number != "" {
					if port, err = strconv.ParseUint(number, 10, 16); err != nil {
						return err
					}
				}
				replies = netip.AddrPortFrom(a, uint16(port))
			}
			s.step().Conntrack = append(s.step().Conntrack, FlowExpectation{
				Text: fmt.Sprintf("%s: udp %s -> %s => %s", at, from, destination, endpoint),
				Flow: udpEntry{f.Source, f.Destination, replies}, Gone: result == "gone",
			})
		}
	}
	return nil
}
