// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
)

// socketSpec is the collection of the socket programs.
func socketSpec() (*ciliumebpf.CollectionSpec, error) {
	spec, err := ciliumebpf.LoadCollectionSpecFromReader(bytes.NewReader(_SockBytes))
	if err != nil {
		return nil, fmt.Errorf("read the socket programs in this binary: %w", err)
	}
	return spec, nil
}

// packetSpec is the collection of the packet programs.
func packetSpec() (*ciliumebpf.CollectionSpec, error) {
	spec, err := ciliumebpf.LoadCollectionSpecFromReader(bytes.NewReader(_TcBytes))
	if err != nil {
		return nil, fmt.Errorf("read the packet programs in this binary: %w", err)
	}
	return spec, nil
}
