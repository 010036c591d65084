// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
)

// SignalBounds are the upper bounds of the buckets of a Histogram, in microseconds; the last bucket has none.
var SignalBounds = [SignalBuckets - 1]uint32{100, 250, 500, 1000, 2500, 5000, 10000, 25000, 50000, 100000, 250000, 500000, 1000000}

// SignalMap has the signals of service ports, by id. Those that have none of their own share those of id 0.
type SignalMap struct{ m *ciliumebpf.Map }

// NewSignalMap is the map of the programs.
func NewSignalMap(m *ciliumebpf.Map) SignalMap { return SignalMap{m} }

// Of returns the signals of a service port; none if there are none, or if it shares those of id 0.
func (s SignalMap) Of(service uint32) (signals ServiceSignals, err error) {
	if err = s.m.Lookup(service, &signals); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		return signals, fmt.Errorf("read the signals of service %d: %w", service, err)
	}
	return signals, nil
}

// Forget removes the signals of a service port that is gone.
func (s SignalMap) Forget(service uint32) error {
	if err := s.m.Delete(service); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove the signals of service %d: %w", service, err)
	}
	return nil
}
