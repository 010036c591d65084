// SPDX-License-Identifier: Apache-2.0

//go:build linux

package devices

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/test/lab"
)

// deadline bounds every wait. Passing tests need far less.
const deadline = 20 * time.Second

// node is a lab node with a watcher.
type node struct {
	t   *testing.T
	at  *lab.Node
	nl  *netlink.Handle
	w   *Watcher
	got chan Uplinks
}

func watchNode(t *testing.T, at *lab.Node, o Options) *node {
	t.Helper()
	if o.In == nil {
		o.In = at.Do
	}
	n := &node{t: t, at: at, nl: at.Netlink(), w: New(o), got: make(chan Uplinks)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.w.Watch(ctx, func(u Uplinks) {
			select {
			case n.got <- u:
			case <-ctx.Done():
			}
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return n
}

// becomes waits until these devices are reported, and logs how long that took.
func (n *node) becomes(want string) (u Uplinks) {
	n.t.Helper()
	start, timeout := time.Now(), time.After(deadline)
	last := "nothing"
	for {
		select {
		case u = <-n.got:
			var words []string
			for _, d := range u.Devices {
				words = append(words, d.Name)
			}
			for _, name := range u.Unmatched {
				words = append(words, "!"+name)
			}
			if last = strings.Join(words, " "); last == want {
				n.t.Logf("%q after %v", want, time.Since(start).Round(time.Millisecond))
				return u
			}
		case <-timeout:
			n.t.Fatalf("timeout while waiting for %q, last report was %q", want, last)
		}
	}
}

// link adds a device that is up.
func (n *node) link(link netlink.Link) netlink.Link {
	n.t.Helper()
	// A tun device belongs to the namespace of the process that opens /dev/net/tun.
	err := n.at.Do(func() error { return netlink.LinkAdd(link) })
	if err == nil {
		link, err = n.nl.LinkByName(link.Attrs().Name)
	}
	if err == nil {
		err = n.nl.LinkSetUp(link)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return link
}

func (n *node) bridge(name string) netlink.Link {
	n.t.Helper()
	return n.link(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}})
}

func (n *node) veth(name string) netlink.Link {
	n.t.Helper()
	return n.link(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"})
}

func (n *node) remove(link netlink.Link) {
	n.t.Helper()
	if err := n.nl.LinkDel(link); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) addr(link netlink.Link, address string) {
	n.t.Helper()
	a, err := netlink.ParseAddr(address)
	if err == nil {
		err = n.nl.AddrAdd(link, a)
	}
	if err != nil {
		n.t.Fatalf("add %s: %v", address, err)
	}
}

// route returns a route through a device. A gateway need not be reachable.
func route(link netlink.Link, dst, gateway string, table int) *netlink.Route {
	r := &netlink.Route{LinkIndex: link.Attrs().Index, Table: table}
	_, r.Dst, _ = net.ParseCIDR(dst)
	if gateway != "" {
		r.Gw, r.Flags = net.ParseIP(gateway), int(netlink.FLAG_ONLINK)
	}
	return r
}

func (n *node) routes(change func(*netlink.Route) error, list ...*netlink.Route) {
	n.t.Helper()
	for _, r := range list {
		if err := change(r); err != nil {
			n.t.Fatalf("%v: %v", r, err)
		}
	}
}

func nodeIPs(at *lab.Node) []netip.Addr { return []netip.Addr{at.Addr4, at.Addr6} }

func TestWatch(t *testing.T) {
	at := lab.NewT(t).Node("node1")
	n := watchNode(t, at, Options{NodeIPs: nodeIPs(at)})
	u := n.becomes("eth0")
	if why := u.Devices[0].Why; why != "node address "+at.Addr4.String() {
		t.Errorf("eth0 was selected because of its %s", why)
	}

	// Devices that do not qualify as uplinks.
	up, side := n.bridge("up0"), n.veth("side0")
	n.addr(up, "192.0.2.1/24")
	n.routes(n.nl.RouteAdd, route(side, "192.0.2.129/32", "", 0), route(side, "2001:db8:2::9/128", "", 0))

	// A route through a gateway, in either family, and in another table.
	for _, r := range []*netlink.Route{
		route(up, "10.244.9.0/24", "192.0.2.2", 0),
		route(up, "fd00:10:244:9::/64", "fe80::2", 0),
		route(up, "0.0.0.0/0", "192.0.2.2", 100),
	} {
		n.routes(n.nl.RouteAdd, r)
		n.becomes("eth0 up0")
		n.routes(n.nl.RouteDel, r)
		n.becomes("eth0")
	}

	// An address of the node.
	ip := netip.MustParseAddr("192.0.2.1")
	n.w.SetNodeIPs([]netip.Addr{ip})
	u = n.becomes("eth0 up0")
	if got := text(u.Devices); got[0] != fmt.Sprintf("eth0 (%d): default route", u.Devices[0].Index) {
		t.Errorf("%q", got)
	}

	// A device that is recreated has another index.
	index := u.Devices[1].Index
	n.remove(up)
	up = n.bridge("up0")
	n.addr(up, "192.0.2.1/24")
	for u = n.becomes("eth0 up0"); u.Devices[1].Index == index; u = n.becomes("eth0 up0") {
	}

	// A change of the MTU alone is reported: what was refused for it can be tried again.
	if err := n.nl.LinkSetMTU(up, 1400); err != nil {
		t.Fatal(err)
	}
	for u = n.becomes("eth0 up0"); u.Devices[1].MTU != 1400; u = n.becomes("eth0 up0") {
	}

	// The bridge handles the packets of its ports, so a port is no uplink.
	port := n.veth("port0")
	n.routes(n.nl.RouteAdd, route(port, "10.244.9.0/24", "192.0.2.2", 0))
	n.becomes("eth0 up0 port0")
	if err := n.nl.LinkSetMaster(port, up); err != nil {
		t.Fatal(err)
	}
	n.becomes("eth0 up0")

	// A device that is down is no uplink.
	if err := n.nl.LinkSetDown(up); err != nil {
		t.Fatal(err)
	}
	n.becomes("eth0")
}

func TestWatchTunnels(t *testing.T) {
	at := lab.NewT(t).Node("node1")
	n := watchNode(t, at, Options{NodeIPs: nodeIPs(at)})
	n.becomes("eth0")
	vxlan := n.link(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "flannel.1"}, VxlanId: 1, Port: 8472})
	n.routes(n.nl.RouteAdd, route(vxlan, "10.244.9.0/24", "", 0))
	if u := n.becomes("eth0 flannel.1"); u.Devices[1].L3 || u.Devices[1].Why != "vxlan tunnel with routes" {
		t.Errorf("%s", u.Devices[1])
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		lab.SkipOrFail(t, err)
	}
	tun := n.link(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, Mode: netlink.TUNTAP_MODE_TUN})
	tap := n.link(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tap0"}, Mode: netlink.TUNTAP_MODE_TAP})
	n.routes(n.nl.RouteAdd, route(tap, "10.244.7.0/24", "", 0), route(tun, "10.244.8.0/24", "", 0))
	if u := n.becomes("eth0 flannel.1 tun0"); !u.Devices[2].L3 {
		t.Errorf("%s", u.Devices[2])
	}
	n.remove(vxlan)
	n.becomes("eth0 tun0")
}

func TestWatchNamed(t *testing.T) {
	at := lab.NewT(t).Node("node1")
	n := watchNode(t, at, Options{NodeIPs: nodeIPs(at), Names: []string{"up+", "side0", "lo"}})
	n.becomes("!up+ !side0 !lo")
	n.bridge("up0")
	n.becomes("up0 !side0 !lo")
	n.veth("side0")
	u := n.becomes("up0 side0 !lo")

	// List returns the same.
	if list, err := n.w.List(); err != nil || !reflect.DeepEqual(list, u) {
		t.Errorf("List returned %v, error %v", list, err)
	}
}

// TestWatchPods: devices of pods are not reported when they come and go, and an unchanged list is
// not reported again.
func TestWatchPods(t *testing.T) {
	at := lab.NewT(t).Node("node1")
	n := watchNode(t, at, Options{NodeIPs: nodeIPs(at)})
	n.becomes("eth0")
	for i := range 5 {
		pod := at.Pod(fmt.Sprintf("pod%d", i))
		if i%2 == 0 {
			if err := pod.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	n.routes(n.nl.RouteAdd, route(n.bridge("up0"), "10.244.9.0/24", "192.0.2.2", 0))
	select {
	case u := <-n.got:
		if len(u.Devices) != 2 {
			t.Errorf("reported %v", u)
		}
	case <-time.After(deadline):
		t.Error("nothing was reported")
	}
}

// manyRoutes returns more routes than a socket buffer holds notifications.
func manyRoutes(link netlink.Link) (list []*netlink.Route) {
	for i := range 3000 {
		list = append(list, route(link, fmt.Sprintf("10.%d.%d.0/24", i/250, i%250), "192.0.2.2", 0))
	}
	return list
}

// TestWatchBurst: the state after a burst of changes is reported.
func TestWatchBurst(t *testing.T) {
	at := lab.NewT(t).Node("node1")
	n := watchNode(t, at, Options{NodeIPs: nodeIPs(at)})
	n.becomes("eth0")
	list := manyRoutes(n.bridge("up0"))
	n.routes(n.nl.RouteAdd, list...)
	n.becomes("eth0 up0")
	n.routes(n.nl.RouteDel, list...)
	n.becomes("eth0")
}

// TestWatchAgain: after a failure, the watcher tries again.
func TestWatchAgain(t *testing.T) {
	at := lab.NewT(t).Node("node1")
	failures := 1 // used by the watcher only
	n := watchNode(t, at, Options{NodeIPs: nodeIPs(at), In: func(fn func() error) error {
		if failures > 0 {
			failures--
			return errors.New("not now")
		}
		return at.Do(fn)
	}})
	n.becomes("eth0")
	n.routes(n.nl.RouteAdd, route(n.bridge("up0"), "10.244.9.0/24", "192.0.2.2", 0))
	n.becomes("eth0 up0")
}

// TestAgain: a device that was recreated under the name of an uplink is an uplink before it is up
// or has an address. An existing device that lost what made it an uplink is none.
func TestAgain(t *testing.T) {
	link := func(index int, name string) netlink.Link {
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index, Name: name, EncapType: "ether"}}
	}
	were := map[string]int{"eth0": 2, "eth1": 3}
	got := again([]netlink.Link{link(1, "lo"), link(3, "eth1"), link(7, "eth0"), link(8, "veth0")}, nil, were)
	if len(got) != 1 || got[0].Index != 7 || got[0].Name != "eth0" {
		t.Errorf("got %v", got)
	}
	found := []Device{{Index: 7, Name: "eth0", Why: "default route"}}
	if got := again([]netlink.Link{link(7, "eth0")}, found, were); len(got) != 1 || got[0].Why != "default route" {
		t.Errorf("got %v", got)
	}
}
