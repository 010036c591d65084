// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// Chains that all service ports share, with upstream's names. In both tables there
// are a KUBE-SERVICES and a KUBE-NODEPORTS.
const (
	servicesChain         = "KUBE-SERVICES"
	nodePortsChain        = "KUBE-NODEPORTS"
	postroutingChain      = "KUBE-POSTROUTING"
	markMasqChain         = "KUBE-MARK-MASQ"
	externalServicesChain = "KUBE-EXTERNAL-SERVICES"
	proxyFirewallChain    = "KUBE-PROXY-FIREWALL"
	forwardChain          = "KUBE-FORWARD"
	firewallChain         = "KUBE-FIREWALL" // kubelet has one of this name too
	canaryChain           = "KUBE-PROXY-CANARY"

	// externalNodePortsChain, which upstream does not have, is the part of
	// KUBE-PROXY-FIREWALL for NodePorts. The name leaves room for a protocol and a port
	// within 28 bytes.
	externalNodePortsChain = "KUBE-REFUSED-PORTS"
	// drainChain stays after Cleanup while established connections need it, or may need it later, until there are rules again.
	drainChain = "KUBE-PROXY-DRAIN"
	// ipvsDrainChain is there while virtual servers of mode ipvs are drained. It is not part
	// of what a datapath keeps right.
	ipvsDrainChain = "KUBE-IPVS-DRAIN"
)

// Chains of one service port begin with these.
const (
	clusterPrefix  = "KUBE-SVC-" // the set of all endpoints
	localPrefix    = "KUBE-SVL-" // those on this node
	externalPrefix = "KUBE-EXT-"
	rangesPrefix   = "KUBE-FW-"
	endpointPrefix = "KUBE-SEP-"
	// oldExternalPrefix is what upstream had before 1.24 instead of externalPrefix. Such
	// chains lead to others. They are deleted, never written.
	oldExternalPrefix = "KUBE-XLB-"
)

var ownPrefixes = []string{clusterPrefix, localPrefix, externalPrefix, rangesPrefix, endpointPrefix, oldExternalPrefix}

// chainName is upstream's name of a chain of a service port, or of one of its
// endpoints: the prefix and 80 bits of a hash.
func chainName(prefix string, port *proxier.ServicePortName, endpoint string) string {
	hash := sha256.Sum256([]byte(port.String() + protocolName(port.Protocol) + endpoint))
	return prefix + base32.StdEncoding.EncodeToString(hash[:])[:hashLength]
}

const hashLength = 16

// isOfServicePort reports whether a chain belongs to one service port.
func isOfServicePort(name string) bool {
	return slices.ContainsFunc(ownPrefixes, func(prefix string) bool {
		return strings.HasPrefix(name, prefix) && len(name) == len(prefix)+hashLength
	})
}

// commonChains do not belong to one service port.
var commonChains = []string{
	servicesChain, nodePortsChain, postroutingChain, markMasqChain, externalServicesChain, externalNodePortsChain,
	proxyFirewallChain, forwardChain, canaryChain, drainChain,
}

// ofIPVS are the chains of mode ipvs alone.
var ofIPVS = []string{"KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER"}

// isOurs reports whether a chain is one of modes iptables and ipvs.
func isOurs(chain string) bool {
	if isOfServicePort(chain) || slices.Contains(commonChains, chain) || slices.Contains(ofIPVS, chain) {
		return true
	}
	for s := range sharedNames {
		if strings.HasPrefix(chain, sharedNames[s].slots) {
			return true
		}
	}
	return false
}

// jumpOf is the target that a rule ends with, if that has no options, as chains have none.
func jumpOf(rule string) string {
	words := strings.Fields(rule)
	if n := len(words); n > 1 && (words[n-2] == "-j" || words[n-2] == "-g") {
		return words[n-1]
	}
	return ""
}

// protocolName is the protocol as the tools spell it, which also names the match for its
// ports.
func protocolName(p proxier.Protocol) string { return strings.ToLower(p.String()) }
