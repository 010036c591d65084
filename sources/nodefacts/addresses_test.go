// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nodefacts

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/test/lab"
)

// deadline bounds every wait; a test that passes never gets near it.
const deadline = 20 * time.Second

// node is a network namespace with a watcher.
type node struct {
	t   *testing.T
	nl  *netlink.Handle
	got chan []netip.Addr
	w   *Addresses
}

func newNode(t *testing.T) *node {
	t.Helper()
	at := lab.NewT(t).Node("node1")
	return watchIn(t, at, at.Do)
}

func watchIn(t *testing.T, at *lab.Node, in func(func() error) error) *node {
	t.Helper()
	n := &node{t: t, nl: at.Netlink(), got: make(chan []netip.Addr), w: &Addresses{In: in}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.w.Watch(ctx, func(list []netip.Addr) {
			select {
			case n.got <- list:
			case <-ctx.Done():
			}
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return n
}

// link adds a device that is up.
func (n *node) link(name string) netlink.Link {
	n.t.Helper()
	link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}
	if err := n.nl.LinkAdd(link); err != nil {
		n.t.Fatal(err)
	}
	if err := n.nl.LinkSetUp(link); err != nil {
		n.t.Fatal(err)
	}
	return link
}

func (n *node) add(link netlink.Link, address string) {
	n.t.Helper()
	a, err := netlink.ParseAddr(address)
	if err == nil {
		err = n.nl.AddrAdd(link, a)
	}
	if err != nil {
		n.t.Fatalf("add %s: %v", address, err)
	}
}

func (n *node) remove(link netlink.Link, address string) {
	n.t.Helper()
	a, err := netlink.ParseAddr(address)
	if err == nil {
		err = n.nl.AddrDel(link, a)
	}
	if err != nil {
		n.t.Fatalf("remove %s: %v", address, err)
	}
}

// text lists what tests add: the rest is the lab's, or the kernel's.
func text(list []netip.Addr) string {
	var words []string
	for _, a := range list {
		if s := a.String(); strings.HasPrefix(s, "192.0.2.") || strings.HasPrefix(s, "2001:db8:2::") {
			words = append(words, s)
		}
	}
	return strings.Join(words, " ")
}

// becomes waits until that is what is told.
func (n *node) becomes(want string) {
	n.t.Helper()
	timeout := time.After(deadline)
	last := "nothing"
	for {
		select {
		case list := <-n.got:
			if last = text(list); last == want {
				return
			}
		case <-timeout:
			n.t.Fatalf("timed out waiting for %q, told was %q", want, last)
		}
	}
}

func TestWatch(t *testing.T) {
	n := newNode(t)
	n.becomes("")
	up := n.link("up0")
	n.add(up, "192.0.2.2/24")
	n.becomes("192.0.2.2")
	n.add(up, "2001:db8:2::1/64")
	n.becomes("192.0.2.2 2001:db8:2::1")
	n.add(up, "192.0.2.1/32")
	n.becomes("192.0.2.1 192.0.2.2 2001:db8:2::1")
	n.remove(up, "192.0.2.2/24")
	n.becomes("192.0.2.1 2001:db8:2::1")

	// One address on two devices is there until it is on none.
	other := n.link("other0")
	n.add(other, "192.0.2.1/32")
	n.add(other, "192.0.2.3/32")
	n.becomes("192.0.2.1 192.0.2.3 2001:db8:2::1")
	n.remove(up, "192.0.2.1/32")
	n.add(up, "192.0.2.4/32")
	n.becomes("192.0.2.1 192.0.2.3 192.0.2.4 2001:db8:2::1")

	// A device that goes takes its addresses along.
	if err := n.nl.LinkDel(other); err != nil {
		t.Fatal(err)
	}
	n.becomes("192.0.2.4 2001:db8:2::1")

	// Those of Services are not the node's.
	ipvs := n.link(ipvsDevices[0])
	n.add(ipvs, "192.0.2.9/32")
	n.add(ipvs, "192.0.2.4/32")
	n.add(up, "192.0.2.5/32")
	n.becomes("192.0.2.4 192.0.2.5 2001:db8:2::1")

	list, err := n.w.List()
	if err != nil || text(list) != "192.0.2.4 192.0.2.5 2001:db8:2::1" {
		t.Errorf("listed %v, error %v", list, err)
	}
}

// A burst is told in few pieces, and its end is not missed.
func TestWatchBurst(t *testing.T) {
	n := newNode(t)
	n.becomes("")
	up := n.link("up0")
	const count = 250
	go func() {
		for i := range count {
			a, _ := netlink.ParseAddr(fmt.Sprintf("192.0.2.%d/32", i+1))
			if err := n.nl.AddrAdd(up, a); err != nil {
				t.Errorf("add %s: %v", a, err)
			}
		}
	}()
	timeout := time.After(deadline)
	told := 0
	for {
		select {
		case list := <-n.got:
			told++
			if len(strings.Fields(text(list))) < count {
				continue
			}
		case <-timeout:
			t.Fatal("the end of the burst was missed")
		}
		break
	}
	if told > count/5 {
		t.Errorf("told %d times of %d addresses", told, count)
	}
}

// What fails is tried again.
func TestWatchAgain(t *testing.T) {
	at := lab.NewT(t).Node("node1")
	failures := 1 // touched by the watcher alone
	n := watchIn(t, at, func(fn func() error) error {
		if failures > 0 {
			failures--
			return errors.New("not now")
		}
		return at.Do(fn)
	})
	n.becomes("")
	n.add(n.link("up0"), "192.0.2.1/32")
	n.becomes("192.0.2.1")
}
