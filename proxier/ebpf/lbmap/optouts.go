// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
)

// OptOutBy is what opted a network namespace out: the value in tdm_optout. Programs look at keys only.
type OptOutBy uint8

const (
	// OptOutByCommand is an opt-out by tandemctl, which lasts until tandemctl removes it.
	OptOutByCommand OptOutBy = 1
	// OptOutByPod is an opt-out by a Pod or its Namespace, which lasts as long as these say so.
	OptOutByPod OptOutBy = 2
)

func (b OptOutBy) String() string {
	if b == OptOutByPod {
		return "pod"
	}
	return "command"
}

// OptOuts reads the map of opt-outs by cookies of network namespaces.
func OptOuts(m *ciliumebpf.Map) (map[uint64]OptOutBy, error) {
	cookies, err := Keys[uint64, uint8](m)
	if err != nil {
		return nil, fmt.Errorf("read the opt-outs: %w", err)
	}
	all := make(map[uint64]OptOutBy, len(cookies))
	for _, cookie := range cookies {
		var by uint8
		switch err := m.Lookup(cookie, &by); {
		case errors.Is(err, ciliumebpf.ErrKeyNotExist): // removed meanwhile
		case err != nil:
			return nil, fmt.Errorf("read opt-out %d: %w", cookie, err)
		default:
			all[cookie] = OptOutBy(by)
		}
	}
	return all, nil
}
