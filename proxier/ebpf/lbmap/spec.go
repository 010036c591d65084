// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"bytes"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
)

// SocketSpec is the collection of the socket programs.
func SocketSpec() (*ciliumebpf.CollectionSpec, error) {
	spec, err := ciliumebpf.LoadCollectionSpecFromReader(bytes.NewReader(_SockBytes))
	if err != nil {
		return nil, fmt.Errorf("read the socket programs in this binary: %w", err)
	}
	return spec, nil
}

// PacketSpec is the collection of the packet programs.
func PacketSpec() (*ciliumebpf.CollectionSpec, error) {
	spec, err := ciliumebpf.LoadCollectionSpecFromReader(bytes.NewReader(_TcBytes))
	if err != nil {
		return nil, fmt.Errorf("read the packet programs in this binary: %w", err)
	}
	return spec, nil
}

// XDPSpec is the collection of the program that forwards before the kernel's stack has a packet.
func XDPSpec() (*ciliumebpf.CollectionSpec, error) {
	spec, err := ciliumebpf.LoadCollectionSpecFromReader(bytes.NewReader(_XdpBytes))
	if err != nil {
		return nil, fmt.Errorf("read the XDP program in this binary: %w", err)
	}
	return spec, nil
}

// ArrivalSpec is the collection of the filter that finds untranslated packets.
func ArrivalSpec() (*ciliumebpf.CollectionSpec, error) {
	spec, err := ciliumebpf.LoadCollectionSpecFromReader(bytes.NewReader(_ArrivalBytes))
	if err != nil {
		return nil, fmt.Errorf("read the filter of packet sockets in this binary: %w", err)
	}
	return spec, nil
}

// HoldSpec is the collection of the netfilter programs.
func HoldSpec() (*ciliumebpf.CollectionSpec, error) {
	spec, err := ciliumebpf.LoadCollectionSpecFromReader(bytes.NewReader(_HoldBytes))
	if err != nil {
		return nil, fmt.Errorf("read the netfilter programs in this binary: %w", err)
	}
	return spec, nil
}

// MonitorSpec is the collection of the programs that report what fails in the others.
func MonitorSpec() (*ciliumebpf.CollectionSpec, error) {
	spec, err := ciliumebpf.LoadCollectionSpecFromReader(bytes.NewReader(_MonitorBytes))
	if err != nil {
		return nil, fmt.Errorf("read the monitor's programs in this binary: %w", err)
	}
	return spec, nil
}
