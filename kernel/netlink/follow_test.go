// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netlink_test

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	rtnl "github.com/tandem-proxy/tandem/kernel/netlink"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestFollowOverflow: an overflow of the socket's buffer, which loses messages, counts as a change,
// and is no error.
func TestFollowOverflow(t *testing.T) {
	at := lab.NewT(t).Node("node1")
	f := rtnl.Follower{What: "routes", Groups: unix.RTMGRP_IPV4_ROUTE, Run: at.Do}
	var sockets [2]*os.File
	for i := range sockets {
		var err error
		if sockets[i], err = f.OpenSocket(); err != nil {
			t.Fatal(err)
		}
		defer sockets[i].Close()
	}
	up, err := at.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2000 {
		to, err := netlink.ParseIPNet(fmt.Sprintf("10.%d.%d.0/24", i/250, i%250))
		if err != nil {
			t.Fatal(err)
		}
		if err := at.Netlink().RouteAdd(&netlink.Route{LinkIndex: up.Attrs().Index, Dst: to}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := sockets[0].Read(make([]byte, 64)); !errors.Is(err, unix.ENOBUFS) {
		t.Fatalf("the socket did not overflow: %v", err)
	}

	changed, lost := make(chan struct{}, 1), make(chan error, 1)
	go func() { lost <- f.ReceiveFrom(sockets[1], changed) }()
	select {
	case <-changed:
	case <-time.After(10 * time.Second):
		t.Error("the overflow did not signal a change")
	}
	// Closing the socket ends receive, the overflow did not.
	sockets[1].Close()
	if err := <-lost; !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}
