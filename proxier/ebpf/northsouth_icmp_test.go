// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// errorsAt captures the ICMP errors that a machine receives.
func errorsAt(t testing.TB, s *lab.Sandbox) *lab.Capture {
	t.Helper()
	c, err := s.Capture(lab.Uplink, func(c lab.Captured) bool { return !c.Outgoing && c.ICMP != nil && c.ICMP.Quoted != nil })
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// either is a message in both versions of ICMP.
type either struct{ four, six uint16 }

func (m either) is(i *packet.ICMP, of netip.Addr) bool {
	if of.Is4() {
		return i.Is(m.four)
	}
	return i.Is(m.six)
}

var (
	unreachable = either{packet.PortUnreachable, packet.PortUnreachable6}
	exceeded    = either{packet.TimeExceeded, packet.TimeExceeded6}
)

// expectError waits for an ICMP error from an address about a packet from src to dst, with
// correct checksums.
func expectError(t testing.TB, c *lab.Capture, m either, from netip.Addr, src, dst netip.AddrPort) {
	t.Helper()
	got, err := c.Expect(t.Context(), func(c lab.Captured) bool {
		return m.is(c.ICMP, from) && c.ICMP.Quoted.Source() == src && c.ICMP.Quoted.Destination() == dst
	})
	if err != nil {
		t.Errorf("error about a packet from %s to %s: %v", src, dst, err)
		return
	}
	if got.Source().Addr() != from {
		t.Errorf("the error comes from %s, want %s", got.Source().Addr(), from)
	}
	if err := got.Verify(); err != nil {
		t.Errorf("%v in\n%s", err, got)
	}
}

// TestErrorsReachTheClient: ICMP errors of routers and backends come from the frontend, and quote
// the packet that the client sent to it.
func TestErrorsReachTheClient(t *testing.T) {
	e := newEdge(t, Options{}, lab.Options{NoOffload: true, Nodes: live.Guarded})
	c := errorsAt(t, e.client.Sandbox)
	for _, pod := range []*lab.Pod{e.here, e.there} {
		e.use(t, pod)
		for i, n := range e.entries() {
			client := netip.AddrPortFrom(addrOf(e.client.Sandbox, n.to.Addr()), uint16(7000+10*i+len(pod.Name)))
			hop := func(ttl uint8) {
				p := packet.NewTCP(client, n.to, packet.SYN, nil)
				if n.network == "udp" {
					p = packet.NewUDP(client, n.to, []byte("who is there"))
				}
				if p.IPv4 != nil {
					p.IPv4.TTL = ttl
				} else {
					p.IPv6.HopLimit = ttl
				}
				if err := e.client.Send(t.Context(), p); err != nil {
					t.Fatal(err)
				}
			}
			// The first hop is the client's own router.
			hop(2)
			expectError(t, c, exceeded, n.to.Addr(), client, n.to)
			if pod == e.there {
				hop(3)
				expectError(t, c, exceeded, n.to.Addr(), client, n.to)
			}
			if n.network == "udp" {
				hop(4)
				expectError(t, c, unreachable, n.to.Addr(), client, n.to)
				if _, err := e.client.Ask(t.Context(), n.network, n.to); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("%s to %s, where nothing listens: %v", n, pod.Name, err)
				}
			}
			if t.Failed() {
				t.Fatalf("%s to %s", n, pod.Name)
			}
		}
	}
}

// TestErrorsReachTheBackend: an ICMP error of the client quotes the packet that the backend sent.
func TestErrorsReachTheBackend(t *testing.T) {
	e := newEdge(t, Options{}, lab.Options{NoOffload: true, Nodes: live.Guarded})
	for _, pod := range []*lab.Pod{e.here, e.there} {
		e.use(t, serve(t, pod))
		c, err := pod.Capture(lab.Uplink, func(c lab.Captured) bool { return !c.Outgoing && (c.ICMP != nil || c.UDP != nil) })
		if err != nil {
			t.Fatal(err)
		}
		for i, n := range e.entries("udp") {
			// The client has no socket for the reply, so its kernel sends an error.
			client := netip.AddrPortFrom(addrOf(e.client.Sandbox, n.to.Addr()), uint16(7000+i))
			if err := e.client.Send(t.Context(), packet.NewUDP(client, n.to, []byte("?"))); err != nil {
				t.Fatal(err)
			}
			request, err := c.Expect(t.Context(), func(c lab.Captured) bool { return c.UDP != nil })
			if err != nil {
				t.Fatal(err)
			}
			if seen := request.Source(); (pod == e.here) != (seen == client) {
				t.Errorf("%s sees %s", pod.Name, seen)
			}
			expectError(t, c, unreachable, request.Source().Addr(), request.Destination(), request.Source())
		}
	}
}
