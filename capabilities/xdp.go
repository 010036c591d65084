// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The parts used of the "netdev" generic netlink family (kernel 6.3).
const (
	netdevFamily          = "netdev"
	netdevCmdDevGet       = 1
	netdevAttrIfindex     = 1
	netdevAttrXDPFeatures = 3
)

// xdpFeatureNames are the bits of the XDP features attribute, lowest first.
var xdpFeatureNames = []string{"basic", "redirect", "ndo-xmit", "xsk-zerocopy", "hw-offload", "rx-sg", "ndo-xmit-sg"}

func probeXDPGeneric(context.Context, *host, string) outcome {
	const pass = 2 // XDP_PASS
	return tryProgram(&ciliumebpf.ProgramSpec{Type: ciliumebpf.XDP, Instructions: returning(pass)})
}

// probeXDPNative asks the driver's advertised features. Attaching would be the
// other way to know, but resets the queues of many drivers.
func probeXDPNative(_ context.Context, _ *host, device string) outcome {
	iface, err := net.InterfaceByName(device)
	if err != nil {
		return inconclusive(err)
	}
	features, err := xdpFeatures(iface.Index)
	if err != nil {
		return inconclusive(err)
	}
	return fromXDPFeatures(features)
}

func fromXDPFeatures(features uint64) outcome {
	var names []string
	for bit, name := range xdpFeatureNames {
		if features&(1<<bit) != 0 {
			names = append(names, name)
		}
	}
	if features&1 == 0 {
		return no(errors.New("the driver has no XDP; generic mode only"))
	}
	return yes("driver offers " + strings.Join(names, ", "))
}

func xdpFeatures(ifindex int) (uint64, error) {
	family, found, err := findGenlFamily(netdevFamily)
	if err != nil {
		return 0, err
	}
	if !found {
		return 0, errors.New("the kernel has no netdev netlink family (since 6.3): XDP modes cannot be asked for without attaching")
	}
	req := nl.NewNetlinkRequest(int(family), 0)
	req.AddData(genlHeader{netdevCmdDevGet, 1})
	req.AddData(nl.NewRtAttr(netdevAttrIfindex, binary.NativeEndian.AppendUint32(nil, uint32(ifindex))))
	replies, err := req.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return 0, fmt.Errorf("query XDP features: %w", err)
	}
	for _, reply := range replies {
		attrs, err := genlAttrs(reply)
		if err != nil {
			return 0, fmt.Errorf("query XDP features: %w", err)
		}
		if value := attrs[netdevAttrXDPFeatures].Value; len(value) == 8 {
			return binary.NativeEndian.Uint64(value), nil
		}
	}
	return 0, errors.New("query XDP features: the reply does not have them")
}
