// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"net"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// TestDevicesComeAndGo: a thousand uplinks come and go under traffic, some before programs are
// attached. No connection on the other uplink fails, and nothing of them is left.
func TestDevicesComeAndGo(t *testing.T) {
	e := newEdge(t, Options{})
	e.use(t, serve(t, e.here), serve(t, e.there))
	e.run(t)
	told, stop := watchUplinks(t, e)
	defer stop()
	go func() { // nothing waits for it
		for range told {
		}
	}()
	load := newLoad(t, e, 2)
	rounds := 1000
	if testing.Short() {
		rounds = 30
	}
	served := 0
	for i := range rounds {
		index := e.addUplink(t, fmt.Sprintf("gone%d", i))
		if i%3 == 0 { // others go at once
			waitFor(t, "the programs on the new uplink", func() bool { return e.serves(index) })
			served++
		}
		if err := e.at.Netlink().LinkDel(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}); err != nil {
			t.Fatal(err)
		}
	}
	uplink := e.uplink(t)
	waitFor(t, "only the remaining uplink to be known", func() bool {
		e.tier.mu.Lock()
		defer e.tier.mu.Unlock()
		_, ok := e.tier.devices.Served[uplink]
		return ok && len(e.tier.devices.Served) == 1
	})
	e.onlyUplink(t)
	load.allAnswered(t, "in the end")
	load.stop()
	n := load.counts()
	t.Logf("%d of %d devices got programs; %d requests over open connections, %d over new ones", served, rounds, n.open, n.fresh)
	if n.broken > 0 || n.failed > 0 {
		t.Errorf("%d of %d connections broke, %d of %d new ones failed", n.broken, len(load.open), n.failed, n.fresh)
	}
}

// TestUplinkGoneAtOnce: of an uplink that vanished before programs were attached to it nothing is left
// in the maps.
func TestUplinkGoneAtOnce(t *testing.T) {
	e := newEdge(t, Options{})
	e.use(t, serve(t, e.here))
	e.run(t)
	there := uplinksOf(t, e.at)
	gone := devices.Device{Index: e.addUplink(t, "gone"), Name: "gone"}
	if err := e.at.Netlink().LinkDel(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: gone.Index}}); err != nil {
		t.Fatal(err)
	}
	for _, list := range [][]devices.Device{append(slices.Clone(there), gone), there} {
		if err := e.tier.SetUplinks(t.Context(), list); err != nil {
			t.Fatal(err)
		}
	}
	e.onlyUplink(t)
}

// onlyUplink checks that the programs know of no other uplink than the one that is there.
func (e *edge) onlyUplink(t *testing.T) {
	t.Helper()
	known, err := lbmap.Keys[uint32, lbmap.Uplink](e.tier.maps["tdm_uplink"])
	if err != nil || len(known) != 1 || int(known[0]) != e.uplink(t) {
		t.Errorf("uplinks in the map: %v, %v", known, err)
	}
}

// addUplink adds a device with a route through a gateway, and returns its index.
func (e *edge) addUplink(t *testing.T, name string) int {
	t.Helper()
	nl := e.at.Netlink()
	d := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}
	if err := nl.LinkAdd(d); err != nil {
		t.Fatal(err)
	}
	link, err := nl.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	index := link.Attrs().Index
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(192, 0, 2, 1), Mask: net.CIDRMask(24, 32)}}
	for _, step := range []func() error{
		func() error { return nl.AddrAdd(link, addr) },
		func() error { return nl.LinkSetUp(link) },
		func() error {
			return nl.RouteAdd(&netlink.Route{
				LinkIndex: index, Gw: net.IPv4(192, 0, 2, 254), Dst: &net.IPNet{IP: net.IPv4(198, 18, 0, 0), Mask: net.CIDRMask(15, 32)},
			})
		},
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	return index
}

// serves reports whether the tier has attached programs to a device.
func (e *edge) serves(index int) bool {
	e.tier.mu.Lock()
	defer e.tier.mu.Unlock()
	_, ok := e.tier.devices.Served[index]
	return ok
}
