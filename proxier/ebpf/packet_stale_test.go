// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestStaleSlots: a program that reads a slot whose backend id was given to another backend meanwhile does not lead a connection there.
func TestStaleSlots(t *testing.T) {
	p := newPath(t, Options{})
	endpoints := []netip.Addr{netip.MustParseAddr("10.244.9.1"), netip.MustParseAddr("10.244.9.2")}
	to := netip.MustParseAddrPort("10.96.0.77:80")
	p.OnServiceAdd(writertest.Service("web", to.Addr().String()))
	p.OnEndpointSliceAdd(writertest.Slice("web-1", "web", endpoints[0].String(), endpoints[1].String()))
	if err := p.sync(); err != nil {
		t.Fatal(err)
	}
	const clients = 64
	// lead returns the endpoints that connections are led to, and how many are dropped.
	lead := func(t *testing.T) (led []netip.Addr, dropped int) {
		t.Helper()
		if err := p.reset(); err != nil {
			t.Fatal(err)
		}
		for i := range clients {
			r, err := p.ask(in, tcp(pickedClient(i), to, packet.SYN))
			if err != nil {
				t.Fatal(err)
			}
			if r.Verdict == shot {
				dropped++
			} else if a := packet.Parse(r.Frame).Destination().Addr(); !slices.Contains(led, a) {
				led = append(led, a)
			}
		}
		counts, err := p.counts()
		if err != nil || counts["DROP_RACED"] != uint64(dropped) {
			t.Errorf("%d packets were dropped; counted %v, error %v", dropped, counts, err)
		}
		return led, dropped
	}
	if led, dropped := lead(t); len(led) != 2 || dropped > 0 {
		t.Fatalf("led to %v, %d dropped", led, dropped)
	}
	for name, reuse := range map[string]func(*lbmap.Backend){
		"by the Service":     func(b *lbmap.Backend) { b.Generation++ },
		"by another Service": func(b *lbmap.Backend) { b.Service++ },
		"by both":            func(b *lbmap.Backend) { b.Generation, b.Service = b.Generation+1, b.Service+1 },
	} {
		// Each has another place in the element that they share.
		for _, stale := range endpoints {
			t.Run(name+" "+stale.String(), func(t *testing.T) {
				backends := tablesOf(p.tier).Backends
				at := slices.IndexFunc(backends, func(b lbmap.Backend) bool { return lbmap.ToAddr(b.Addr) == stale })
				before := backends[at]
				defer func() { backends[at] = before }()
				reuse(&backends[at])
				if led, dropped := lead(t); len(led) != 1 || led[0] == stale || dropped == 0 {
					t.Errorf("led to %v, %d dropped", led, dropped)
				}
			})
		}
	}
}
