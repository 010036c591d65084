// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"fmt"
	"hash/fnv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// The structures of bpf/lb_types.h under their Go names.
type (
	FrontendKey    = sockFrontendKey
	FrontendValue  = sockFrontend
	Backend        = sockBackend
	Slots          = sockSlots
	Service        = sockService
	ServiceStats   = sockServiceStats
	RangeKey       = sockRangeKey
	Node           = sockNode
	Prefix         = sockPrefix
	Meta           = sockMeta
	ServiceSignals = sockServiceSignals
	Histogram      = sockSignalHistogram
	Successor      = sockSuccessor
	SocketDest     = sockSockDest
	AffinityKey    = sockAffinityKey
	Affinity       = sockAffinity
	UDPPeerKey     = sockUdpPeerKey
	UDPPeer        = sockUdpPeer
	TargetKey      = tcTargetKey
	// PortSpan is a range of source ports as the programs have it.
	PortSpan = tcPortRange
	// Cover is a list of prefixes that contain all ClusterIPs.
	Cover = arrivalCover
	// Failure is what the monitor's programs report, and FailureRate what they count.
	Failure     = monitorFailure
	FailureRate = monitorRate
)

// PutName writes what n.String would return, and returns the length. A hash replaces the end
// of a name that is too long, so that names stay distinct.
func PutName(to *[len(Service{}.Name)]uint8, n proxier.ServicePortName) uint8 {
	b := append(to[:0], n.Namespace...)
	b = append(append(b, '/'), n.Name...)
	if n.Port != "" {
		b = append(append(b, ':'), n.Port...)
	}
	if len(b) > len(to) { // b has left the array
		hash := fnv.New64a()
		hash.Write(b)
		end := fmt.Appendf(nil, "~%016x", hash.Sum64())
		keep := len(to) - len(end)
		copy(to[:], b[:keep])
		copy(to[keep:], end)
		return uint8(len(to))
	}
	return uint8(len(b))
}

// SplitName is the name that PutName wrote, in parts.
func (e *Service) SplitName() (namespace, name, port string) {
	namespace, name, _ = strings.Cut(string(e.Name[:min(int(e.NameLen), len(e.Name))]), "/")
	name, port, _ = strings.Cut(name, ":")
	return namespace, name, port
}

func (k FrontendKey) String() string {
	return fmt.Sprintf("%s/%s", ToAddrPort(k.Addr, k.Port), proxier.Protocol(k.Proto))
}

func (k RangeKey) String() string {
	bits := int(k.PrefixLen) - 32
	a := ToAddr(k.Addr)
	if a.Is4() {
		bits -= 96
	}
	return fmt.Sprintf("%s/%d", a, bits)
}

func (b Backend) String() string {
	return fmt.Sprintf("%s/%s", ToAddrPort(b.Addr, b.Port), proxier.Protocol(b.Proto))
}

// String is the name of the service port and its protocol.
func (e *Service) String() string {
	return string(e.Name[:min(int(e.NameLen), len(e.Name))]) + "/" + proxier.Protocol(e.Proto).String()
}
