// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"strings"
)

// Kind says why an address is a frontend.
type Kind uint8

// The kinds of frontends. Where two claim the same address, the lower kind has
// it: calling a ClusterIP an external IP does not take it away, nor does that get
// around the source ranges of a load balancer IP. The eBPF maps hold these
// numbers.
const (
	ClusterIP Kind = iota + 1
	LoadBalancer
	ExternalIP
	NodePort
	// HostPort is a port of a Pod at all addresses of its node, HostIP one at an address. No Service has these.
	HostPort
	HostIP
	kinds
)

// properties are what differs between kinds. Tiers use properties, not kinds, so
// that a further kind is a row here.
type properties struct {
	name string
	// external, wildcard and echo: see the methods of these names. ofPod says that no Service has such frontends.
	external, wildcard, echo, ofPod bool
}

var kindProperties = [kinds]properties{
	ClusterIP:    {name: "ClusterIP"},
	LoadBalancer: {name: "LoadBalancer", external: true, echo: true},
	ExternalIP:   {name: "ExternalIP", external: true, echo: true},
	NodePort:     {name: "NodePort", external: true, wildcard: true},
	HostPort:     {name: "HostPort", external: true, wildcard: true, ofPod: true},
	HostIP:       {name: "HostIP", external: true, ofPod: true},
}

// properties are all false for a number that is not a kind.
func (k Kind) properties() *properties {
	if k < kinds {
		return &kindProperties[k]
	}
	return &kindProperties[0]
}

// External says that clients outside of the cluster use the address, and that
// externalTrafficPolicy applies. All other kinds are for clients in the cluster:
// internalTrafficPolicy applies, and the address is from the ServiceCIDRs.
func (k Kind) External() bool { return k.properties().external }

// Wildcard says that the frontend has only a port: it is served at every address of the
// node that NodeRules select.
func (k Kind) Wildcard() bool { return k.properties().wildcard }

// AnswersEcho says that the proxy answers ICMP echo requests to the address if no
// device of this node has it. For ClusterIPs, they are rejected like all packets to
// ports that are not served. For wildcards, the node answers itself.
func (k Kind) AnswersEcho() bool { return k.properties().echo }

// kindSet is a set of kinds; the zero value is all of them.
type kindSet uint8

func (s kindSet) has(k Kind) bool { return s == 0 || s>>k&1 == 1 }

// parseKinds reads a list of kinds, separated by commas.
func parseKinds(text string) (s kindSet, err error) {
	for word := range strings.SplitSeq(text, ",") {
		kind := kinds
		for k := ClusterIP; k < kinds; k++ {
			if !k.properties().ofPod && strings.EqualFold(strings.TrimSpace(word), k.String()) {
				kind = k
			}
		}
		if kind == kinds {
			return 0, fmt.Errorf("%.32q is none of ClusterIP, LoadBalancer, ExternalIP and NodePort", word)
		}
		s |= 1 << kind
	}
	return s, nil
}

func (k Kind) String() string {
	if name := k.properties().name; name != "" {
		return name
	}
	return fmt.Sprintf("kind %d", uint8(k))
}
