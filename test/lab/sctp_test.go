// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab_test

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

func TestSCTP(t *testing.T) {
	if err := lab.SCTPAvailable(); err != nil {
		lab.SkipOrFailModule(t, err)
	}
	l := lab.NewT(t, lab.Options{Nodes: lab.NodeSettings{Conntrack: true}})
	n := l.Node("node1")
	web, client := n.Pod("web"), l.Client("c")
	srv, err := web.ServeSCTP(8080)
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range []netip.Addr{web.Addr4, web.Addr6, mapped(web.Addr4)} {
		want := client.Addr6
		if to.Unmap().Is4() {
			want = client.Addr4
		}
		got, err := client.Ask(bg, "sctp", netip.AddrPortFrom(to, 8080))
		if err != nil || got.Server != "web" || got.Peer.Addr() != want {
			t.Errorf("%s: answer %+v, %v, want from web, seen as %s", to, got, err, want)
		}
		// Ports without a server are refused, and so are TCP connections to the SCTP port.
		if _, err := client.Ask(bg, "sctp", netip.AddrPortFrom(to, 8081)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: port without a server: %v, want a refusal", to, err)
		}
		if _, err := client.Ask(bg, "tcp", netip.AddrPortFrom(to, 8080)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: TCP: %v, want a refusal", to, err)
		}
	}
	if got := srv.Conns.Load(); got != 3 {
		t.Errorf("%d connections, want 3", got)
	}
	// A refusal by the network (ICMP) ends the attempt as well.
	reject := func(tables, with string) {
		if out, err := n.Command(bg, tables, "-I", "FORWARD", "-p", "sctp", "-j", "REJECT", "--reject-with", with).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	reject("iptables", "icmp-port-unreachable")
	reject("ip6tables", "icmp6-port-unreachable")
	for _, to := range []netip.Addr{web.Addr4, web.Addr6} {
		if _, err := client.Ask(bg, "sctp", netip.AddrPortFrom(to, 8080)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: rejected by a rule: %v, want a refusal", to, err)
		}
	}
}
