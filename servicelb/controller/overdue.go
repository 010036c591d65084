// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// unservedFor is how long a node may not serve an address that a Service has before the address is withdrawn.
const unservedFor = 3 * time.Second

type serviceAddress struct {
	service types.UID
	addr    netip.Addr
}

// overdue has the addresses that Services have although they are not served.
type overdue struct {
	wake  func(after time.Duration)
	since map[serviceAddress]time.Time
	asked map[serviceAddress]bool // since begin
}

func newOverdue(wake func(time.Duration)) *overdue {
	return &overdue{wake: wake, since: map[serviceAddress]time.Time{}}
}

// begin begins a decision.
func (o *overdue) begin() { o.asked = map[serviceAddress]bool{} }

// is implements servicelb.Objects.
func (o *overdue) is(s *v1.Service, a netip.Addr) bool {
	key := serviceAddress{s.UID, a}
	o.asked[key] = true
	since, known := o.since[key]
	if !known {
		o.since[key] = time.Now()
		o.wake(unservedFor)
		return false
	}
	return time.Since(since) >= unservedFor
}

// end forgets what is served again.
func (o *overdue) end() {
	for key := range o.since {
		if !o.asked[key] {
			delete(o.since, key)
		}
	}
}
