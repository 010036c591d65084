// SPDX-License-Identifier: Apache-2.0

package xfrm

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/test/lab"
)

// TestFollower: policies that act on packets are told from others, and changes are noticed.
func TestFollower(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	found := make(chan bool, 16)
	f := NewFollower(func() error {
		acts, err := Acts()
		if err == nil {
			found <- acts
		}
		return err
	})
	f.Run = n.Do
	list := f.List
	f.List = func() error { return n.Do(list) }
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f.Follow(ctx)
	}()
	defer func() {
		stop()
		<-ended
	}()
	expect := func(what string, want bool) {
		t.Helper()
		select {
		case got := <-found:
			if got != want {
				t.Errorf("%s: %v, want %v", what, got, want)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%s was not noticed", what)
		}
	}
	expect("no policy", false)
	_, dst, _ := net.ParseCIDR("10.244.2.0/24")
	_, src, _ := net.ParseCIDR("0.0.0.0/0")
	tunnel := []netlink.XfrmPolicyTmpl{{Src: n.Addr4.AsSlice(), Dst: net.IPv4(172, 18, 0, 2), Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL}}
	for _, test := range []struct {
		name   string
		policy netlink.XfrmPolicy
		want   bool
	}{
		{"exception", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_OUT}, false},
		{"inbound", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_IN, Tmpls: tunnel}, false},
		{"of an interface", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_OUT, Tmpls: tunnel, Ifid: 7}, false},
		{"tunnel", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_OUT, Tmpls: tunnel}, true},
		{"block", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_OUT, Action: netlink.XFRM_POLICY_BLOCK}, true},
	} {
		test.policy.Src, test.policy.Dst = src, dst
		if err := n.Do(func() error { return netlink.XfrmPolicyAdd(&test.policy) }); err != nil {
			t.Fatalf("%s: %v", test.name, err)
		}
		expect(test.name, test.want)
		if err := n.Do(func() error { return netlink.XfrmPolicyDel(&test.policy) }); err != nil {
			t.Fatalf("%s: %v", test.name, err)
		}
		expect("without "+test.name, false)
	}
}
