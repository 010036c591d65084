// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"bytes"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/kernel/loading"
)

// embedded returns a function that returns copies of a collection in this binary, which it parses first.
func embedded(what string, object []byte) func() (*ciliumebpf.CollectionSpec, error) {
	parsed := loading.NewValue(func() (*ciliumebpf.CollectionSpec, error) {
		spec, err := ciliumebpf.LoadCollectionSpecFromReader(bytes.NewReader(object))
		if err != nil {
			return nil, fmt.Errorf("read the %s in this binary: %w", what, err)
		}
		return spec, nil
	})
	return func() (*ciliumebpf.CollectionSpec, error) {
		spec, err := parsed.Get()
		return spec.Copy(), err
	}
}

var (
	// SocketSpec is the collection of the socket programs.
	SocketSpec = embedded("socket programs", _SockBytes)
	// PacketSpec is the collection of the packet programs.
	PacketSpec = embedded("packet programs", _TcBytes)
	// XDPSpec is the collection of the program that forwards before the kernel's stack has a packet.
	XDPSpec = embedded("XDP program", _XdpBytes)
	// ArrivalSpec is the collection of the filter that finds untranslated packets.
	ArrivalSpec = embedded("filter of packet sockets", _ArrivalBytes)
	// HoldSpec is the collection of the netfilter programs.
	HoldSpec = embedded("netfilter programs", _HoldBytes)
	// MonitorSpec is the collection of the programs that report what fails in the others.
	MonitorSpec = embedded("monitor's programs", _MonitorBytes)
)
