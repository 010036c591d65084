// SPDX-License-Identifier: Apache-2.0

package flowtable

import (
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// TestTimeouts: the timeout of a flow depends on its protocol and state.
func TestTimeouts(t *testing.T) {
	timeouts := Timeouts{Established: 6 * time.Second, CloseWait: 5 * time.Second, Opening: 4 * time.Second, Closed: 3 * time.Second, UDPStream: 2 * time.Second, UDP: time.Second}
	const established = lbmap.FlowReplied | lbmap.FlowEstablished
	for _, test := range []struct {
		name     string
		protocol proxier.Protocol
		flags    uint32
		want     time.Duration
	}{
		{"opening", proxier.TCP, 0, timeouts.Opening},
		{"answered", proxier.TCP, lbmap.FlowReplied, timeouts.Opening},
		{"established", proxier.TCP, established, timeouts.Established},
		{"client closed its half", proxier.TCP, established | lbmap.FlowFINRequest, timeouts.CloseWait},
		{"server closed its half", proxier.TCP, established | lbmap.FlowFINReply, timeouts.CloseWait},
		{"closed", proxier.TCP, established | lbmap.FlowFINRequest | lbmap.FlowFINReply | lbmap.FlowClosed, timeouts.Closed},
		{"reset while opening", proxier.TCP, lbmap.FlowClosed, timeouts.Closed},
		{"one way", proxier.UDP, 0, timeouts.UDP},
		{"both ways", proxier.UDP, lbmap.FlowReplied, timeouts.UDPStream},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := timeouts.of(stateOf(test.protocol, test.flags)); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
			f := lbmap.Flow{Flags: uint64(test.flags), Seen: 1000}
			f.Request.Proto = uint8(test.protocol)
			limit := uint32(test.want / time.Second)
			if isUp(&f, &timeouts, 1000+limit) || !isUp(&f, &timeouts, 1001+limit) {
				t.Errorf("the flow does not time out after %s", test.want)
			}
		})
	}
	if got := (Timeouts{UDP: time.Hour}).WithDefaults(); got.UDP != time.Hour || got.Established != DefaultTimeouts().Established {
		t.Errorf("defaults: %+v", got)
	}
}

// TestStaleClaims: a flow whose claim is older than any write takes is ended, and no other.
func TestStaleClaims(t *testing.T) {
	table := &Table{}
	f := &lbmap.Flow{Life: lbmap.FlowLife(7, lbmap.FlowClaimed)}
	look := func(want bool) {
		t.Helper()
		seen := map[uint32]claim{}
		if got := table.isStale(1, f, seen); got != want {
			t.Errorf("stale: %v, want %v", got, want)
		}
		table.stale = seen
	}
	age := func() {
		for id, c := range table.stale {
			c.since = c.since.Add(-staleAfter)
			table.stale[id] = c
		}
	}
	look(false)
	look(false) // soon afterwards
	age()
	f.Life = lbmap.FlowLife(8, lbmap.FlowClaimed)
	look(false) // another flow
	f.Life = lbmap.FlowLife(8, lbmap.FlowYoung)
	age()
	look(false)
	f.Life = lbmap.FlowLife(8, lbmap.FlowClaimed)
	look(false)
	age()
	look(true)
}

// TestMapSizes: the maps have space for the configured number of flows, and the lengths of rings are
// powers of two, as the programs require.
func TestMapSizes(t *testing.T) {
	for _, s := range []lbmap.Sizes{lbmap.DefaultSizes(), {TCPFlows: 5, UDPFlows: 3, YoungFlows: 9}} {
		m := MapSizes(s)
		young := m["tdm_flow_young"] - lbmap.MaxClosed
		if young&(young-1) != 0 || young < s.YoungFlows {
			t.Errorf("%d slots for %d young flows", young, s.YoungFlows)
		}
		if records := m["tdm_flow"]; records != s.TCPFlows+s.UDPFlows+m["tdm_flow_young"]+1 || m["tdm_flow_entry"] < 4*records {
			t.Errorf("map sizes %v for %+v", m, s)
		}
	}
}
