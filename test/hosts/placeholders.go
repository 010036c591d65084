// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/test/lab"
)

// place is where a text is used.
type place struct {
	family Family // of a text for one family; otherwise empty
	node   *lab.Node
	pod    *lab.Pod // that is attached; nil for none
}

// constants are placeholders with the same value everywhere, by family.
var constants = map[Family]map[string]string{
	IPv4: {
		"cluster": "10.244.0.0/16", "external": lab.ExternalPrefix4.String(), "cached": "10.96.0.20",
		"len": "32", "plen": "24", "nodelen": "16", "nodad": "", "icmp": "icmp", "multicast": "224.0.0.0/4",
	},
	IPv6: {
		"cluster": "fd00:10:244::/48", "external": lab.ExternalPrefix6.String(), "cached": "fd00:10:96::14",
		"len": "128", "plen": "64", "nodelen": "64", "nodad": " nodad", "icmp": "ipv6-icmp", "multicast": "ff00::/8",
	},
}

var placeholder = regexp.MustCompile(`\{[a-z]+[46]?\}`)

// fill replaces placeholders, which are names in braces. Those with a family have its number, as
// in {self4}; in texts for one family, they need none. A node's text can use:
//
//	self, peer             addresses of this node, and of the other one
//	router                 default gateway of the nodes
//	pods, otherpods        ranges of the pods of this node, and of the other one
//	net, othernet          first addresses of these
//	here, client           addresses of the pods on the node under test
//	bridge                 last address of the pods' range
//	cluster                range of all pods
//	external               range of external and load balancer IPs
//	cached                 ClusterIP of the Service with policy Cluster and an endpoint elsewhere
//	multicast              range of multicast addresses
//	len, nodelen, plen     length of an address, of the nodes' subnet, of a node's range of pods
//	nodad                  option for addresses that are used at once
//	icmp                   name of the protocol in iptables
//	mac                    first byte of hardware addresses of this node
//	state, nodename        directory for files, name of the node
//
// A text for a pod also has its address, pod, and without a family its number, index, the path of
// its network namespace, netns, and the lab's device on the node, link.
func (w *World) fill(text string, p place) (string, error) {
	var unknown error
	text = placeholder.ReplaceAllStringFunc(text, func(found string) string {
		name, family := found[1:len(found)-1], p.family
		if last := len(name) - 1; name[last] == '4' || name[last] == '6' {
			name, family = name[:last], Family(name[last:])
		}
		value, ok := w.value(name, family, p)
		if !ok && unknown == nil {
			unknown = fmt.Errorf("unknown placeholder %s in:\n%s", found, text)
		}
		return value
	})
	return text, unknown
}

func (w *World) value(name string, f Family, p place) (value string, ok bool) {
	peer, mac := w.Other, "02"
	if p.node == w.Other {
		peer, mac = w.Node, "04"
	}
	switch {
	case name == "mac":
		return mac, true
	case name == "state":
		return w.dir, true
	case name == "nodename":
		return p.node.Name, true
	case p.pod != nil && name == "index":
		return strconv.Itoa(int(p.pod.Addr4.As4()[3])), true
	case p.pod != nil && name == "netns":
		return p.pod.NetNSPath(), true
	case p.pod != nil && name == "link":
		return p.pod.HostLink, true
	case f == "":
		return "", false
	case p.pod != nil && name == "pod":
		return address(p.pod.Sandbox, f).String(), true
	}
	switch name {
	case "self":
		return address(p.node.Sandbox, f).String(), true
	case "peer":
		return address(peer.Sandbox, f).String(), true
	case "router":
		return address(w.Lab.Fabric(), f).String(), true
	case "pods":
		return podRange(p.node, f).String(), true
	case "otherpods":
		return podRange(peer, f).String(), true
	case "net":
		return podRange(p.node, f).Addr().String(), true
	case "othernet":
		return podRange(peer, f).Addr().String(), true
	case "here":
		return address(w.Here.Sandbox, f).String(), true
	case "client":
		return address(w.Pod.Sandbox, f).String(), true
	case "bridge":
		return gateway(podRange(p.node, f)).String(), true
	}
	value, ok = constants[f][name]
	return value, ok
}

// gateway is the address in a range of pods that the lab uses on the node.
func gateway(p netip.Prefix) netip.Addr {
	text := p.Addr().String()
	if p.Addr().Is4() {
		return netip.MustParseAddr(strings.TrimSuffix(text, "0") + "254")
	}
	return netip.MustParseAddr(text + "ffff")
}

// address returns the address of a machine.
func address(s *lab.Sandbox, f Family) netip.Addr {
	if f == IPv4 {
		return s.Addr4
	}
	return s.Addr6
}

func podRange(n *lab.Node, f Family) netip.Prefix {
	if f == IPv4 {
		return n.PodPrefix4
	}
	return n.PodPrefix6
}
