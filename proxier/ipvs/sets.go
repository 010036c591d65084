// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// setName is one of the sets of addresses, with upstream's names and types.
type setName uint8

const (
	loopBack setName = iota // endpoints on this node, each with itself as the client
	clusterIP
	externalIP
	externalIPLocal
	loadBalancer
	loadBalancerLocal
	loadBalancerFW // with source ranges
	loadBalancerSourceCIDR
	loadBalancerSourceIP
	nodePortTCP
	nodePortLocalTCP
	nodePortUDP
	nodePortLocalUDP
	nodePortSCTP
	nodePortLocalSCTP
	healthCheckNodePort
	boundIPs // all on kube-ipvs0
	setNames
)

// setType is a type of the kernel's.
type setType string

const (
	hashIP        setType = "hash:ip"
	hashIPPort    setType = "hash:ip,port"
	hashIPPortIP  setType = "hash:ip,port,ip"
	hashIPPortNet setType = "hash:ip,port,net"
	bitmapPort    setType = "bitmap:port"
)

var allSets = [setNames]struct {
	name string
	is   setType
}{
	loopBack:               {"KUBE-LOOP-BACK", hashIPPortIP},
	clusterIP:              {"KUBE-CLUSTER-IP", hashIPPort},
	externalIP:             {"KUBE-EXTERNAL-IP", hashIPPort},
	externalIPLocal:        {"KUBE-EXTERNAL-IP-LOCAL", hashIPPort},
	loadBalancer:           {"KUBE-LOAD-BALANCER", hashIPPort},
	loadBalancerLocal:      {"KUBE-LOAD-BALANCER-LOCAL", hashIPPort},
	loadBalancerFW:         {"KUBE-LOAD-BALANCER-FW", hashIPPort},
	loadBalancerSourceCIDR: {"KUBE-LOAD-BALANCER-SOURCE-CIDR", hashIPPortNet},
	loadBalancerSourceIP:   {"KUBE-LOAD-BALANCER-SOURCE-IP", hashIPPortIP},
	nodePortTCP:            {"KUBE-NODE-PORT-TCP", bitmapPort},
	nodePortLocalTCP:       {"KUBE-NODE-PORT-LOCAL-TCP", bitmapPort},
	nodePortUDP:            {"KUBE-NODE-PORT-UDP", bitmapPort},
	nodePortLocalUDP:       {"KUBE-NODE-PORT-LOCAL-UDP", bitmapPort},
	nodePortSCTP:           {"KUBE-NODE-PORT-SCTP-HASH", hashIPPort},
	nodePortLocalSCTP:      {"KUBE-NODE-PORT-LOCAL-SCTP-HASH", hashIPPort},
	healthCheckNodePort:    {"KUBE-HEALTH-CHECK-NODE-PORT", bitmapPort},
	boundIPs:               {"KUBE-IPVS-IPS", hashIP},
}

// set is one in the kernel.
type set struct {
	name   setName
	family proxier.Family
}

// maxSetName is what the kernel takes, without the byte that ends it (IPSET_MAXNAMELEN).
const maxSetName = 31

// String is the name that the kernel has for it.
func (s set) String() string {
	name := allSets[s.name].name
	if s.family == proxier.IPv6 {
		name = "KUBE-6-" + strings.TrimPrefix(name, "KUBE-")
	}
	return name[:min(len(name), maxSetName)]
}

// match is the match of a rule for packets whose parts are in it.
func (s set) match(parts string) string { return fmt.Sprintf("-m set --match-set %s %s", s, parts) }

// member is one of a set. What its type has not is zero.
type member struct {
	set
	addr     netip.Addr
	protocol proxier.Protocol
	port     uint16
	from     netip.Prefix // the third part, an address or a network
}

func (m member) String() string {
	return fmt.Sprintf("%s %s,%d:%d,%s", m.set, m.addr, uint8(m.protocol), m.port, m.from)
}

// memberOf is an address and a port in a set.
func memberOf(name setName, to netip.AddrPort, protocol proxier.Protocol) member {
	m := member{set: set{name, proxier.FamilyOf(to.Addr())}, port: to.Port()}
	if allSets[name].is != bitmapPort {
		m.addr, m.protocol = to.Addr(), protocol
	}
	return m
}

// echoOf is an echo request to an address, which counts as a port there (type and code).
func echoOf(name setName, a netip.Addr) member {
	if a.Is4() {
		return memberOf(name, netip.AddrPortFrom(a, 8<<8), 1)
	}
	return memberOf(name, netip.AddrPortFrom(a, 128<<8), 58)
}
