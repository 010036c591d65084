// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestFlowFailures: TCP flows count as refused if the backend answers the SYN by a reset, and as unanswered if they time out, or are
// evicted, without an answer. Established and half-open ones do not.
func TestFlowFailures(t *testing.T) {
	sizes := pathSizes
	sizes.YoungFlows = 16
	p := newPath(t, Options{Sizes: sizes})
	p.endsCluster(t)
	e := endsOf(proxier.IPv4)
	client := func(i int) netip.AddrPort { return netip.AddrPortFrom(e.client.Addr(), uint16(2000+i)) }
	failures := func() (refused, unanswered uint64) {
		t.Helper()
		list, err := p.tier.Traffic()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			refused, unanswered = refused+s.Refused, unanswered+s.Unanswered
		}
		return refused, unanswered
	}
	expect := func(what string, refused, unanswered uint64) {
		t.Helper()
		if r, u := failures(); r != refused || u != unanswered {
			t.Errorf("%s: %d refused and %d unanswered, want %d and %d", what, r, u, refused, unanswered)
		}
	}
	timeouts := flowtable.Timeouts{}.WithDefaults()
	expire := func() {
		t.Helper()
		if _, err := p.tier.flowTable.Sweep(t.Context(), &timeouts, flowtable.MonotonicSeconds()+uint32((timeouts.Opening+2*time.Second)/time.Second)); err != nil {
			t.Fatal(err)
		}
	}

	reply := p.establish(t, datapath.Tuple{Src: client(0), Dst: e.local})
	p.send(t, out, tcp(reply.Src, reply.Dst, packet.RST))
	expect("a reset of an established connection", 0, 0)

	p.send(t, in, tcp(client(1), e.local, packet.SYN))
	p.send(t, out, tcp(e.here, client(1), packet.RST|packet.ACK))
	p.send(t, out, tcp(e.here, client(1), packet.RST|packet.ACK))
	expect("a refused connection", 1, 0)

	p.send(t, in, tcp(client(2), e.local, packet.SYN))
	p.send(t, out, tcp(e.here, client(2), packet.SYN|packet.ACK))
	p.send(t, in, tcp(client(3), e.local, packet.SYN))
	expect("connections that begin", 1, 0)
	expire()
	expect("a half-open connection and one without an answer that timed out", 1, 1)

	for i := range 2 * int(sizes.YoungFlows) {
		p.send(t, in, tcp(client(100+i), e.local, packet.SYN))
	}
	expect("connections without an answer that were evicted", 1, 1+uint64(sizes.YoungFlows))
}
