// SPDX-License-Identifier: Apache-2.0

package flowtable

import "time"

// Timeouts say how long a flow without packets is remembered. Zero is the
// default.
type Timeouts struct {
	// TCP: established connections; half-closed ones; those that are not established yet; closed
	// ones.
	Established, CloseWait, Opening, Closed time.Duration
	// UDP: flows with packets both ways, and of one way alone.
	UDPStream, UDP time.Duration
}

// DefaultTimeouts are those of netfilter's conntrack, as kube-proxy sets
// them, except for closed connections: either end answers what still arrives.
func DefaultTimeouts() Timeouts {
	return Timeouts{
		Established: 24 * time.Hour, CloseWait: time.Hour, Opening: time.Minute, Closed: 10 * time.Second,
		UDPStream: 2 * time.Minute, UDP: 30 * time.Second,
	}
}

// WithDefaults fills in what is zero.
func (t Timeouts) WithDefaults() Timeouts {
	d := DefaultTimeouts()
	for _, f := range []struct{ at, d *time.Duration }{
		{&t.Established, &d.Established}, {&t.CloseWait, &d.CloseWait}, {&t.Opening, &d.Opening}, {&t.Closed, &d.Closed},
		{&t.UDPStream, &d.UDPStream}, {&t.UDP, &d.UDP},
	} {
		if *f.at <= 0 {
			*f.at = *f.d
		}
	}
	return t
}
