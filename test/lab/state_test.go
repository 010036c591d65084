// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
	mobyipvs "github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

// script runs one in the network namespace of the calling thread.
func script(text string) func() error {
	return func() error {
		if out, err := exec.Command("sh", "-ec", text).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", text, err, out)
		}
		return nil
	}
}

// TestState: the state of a node shows each kind of change, and no traffic.
func TestState(t *testing.T) {
	settings := lab.NodeSettings{Masquerade: true}
	if err := settings.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	n := lab.NewT(t, lab.Options{Nodes: settings}).Node("node1")
	p := n.Pod("p")
	mustServe(t, p.Sandbox, 80)
	state := func() string {
		t.Helper()
		s, err := n.State(bg)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	do := func(fn func() error) {
		t.Helper()
		if err := n.Do(fn); err != nil {
			t.Fatal(err)
		}
	}
	before := state()
	for _, a := range families(n.Sandbox, p.Sandbox) {
		if _, err := n.Ask(bg, "tcp", port(a[1], 80)); err != nil {
			t.Error(err)
		}
	}
	if after := state(); after != before {
		t.Errorf("traffic changes it:\n%s", cmp.Diff(before, after))
	}

	shows := func(t *testing.T, change, undo func() error) {
		t.Helper()
		before := state()
		do(change)
		if state() == before {
			t.Error("it does not show the change")
		}
		do(undo)
		if after := state(); after != before {
			t.Errorf("after the change is undone:\n%s", cmp.Diff(before, after))
		}
	}
	for _, c := range []struct{ name, change, undo string }{
		{"setting", "echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet", "echo 0 > /proc/sys/net/ipv4/conf/all/route_localnet"},
		{"setting of a module", "echo 61 > /proc/sys/net/netfilter/nf_conntrack_icmp_timeout", "echo 30 > /proc/sys/net/netfilter/nf_conntrack_icmp_timeout"},
		{"IPv4 rule", "iptables -t nat -A POSTROUTING -j RETURN", "iptables -t nat -D POSTROUTING -j RETURN"},
		{"IPv6 rule", "ip6tables -t nat -A POSTROUTING -j RETURN", "ip6tables -t nat -D POSTROUTING -j RETURN"},
		{"nftables", "nft add table inet foreign", "nft delete table inet foreign"},
		{"address", "ip address add 192.0.2.1/32 dev lo", "ip address delete 192.0.2.1/32 dev lo"},
		{"route", "ip -6 route add blackhole 2001:db8:1::/64", "ip -6 route delete blackhole 2001:db8:1::/64"},
	} {
		t.Run(c.name, func(t *testing.T) { shows(t, script(c.change), script(c.undo)) })
	}
	t.Run("ipset", func(t *testing.T) {
		if _, err := exec.LookPath("ipset"); err != nil {
			lab.SkipOrFail(t, err)
		}
		shows(t, script("ipset create foreign hash:ip,port"), script("ipset destroy foreign"))
		do(script("ipset create foreign hash:ip,port"))
		shows(t, script("ipset add foreign 192.0.2.1,tcp:80"), script("ipset del foreign 192.0.2.1,tcp:80"))
	})
	t.Run("IPVS", func(t *testing.T) {
		var handle *mobyipvs.Handle
		err := n.Do(func() (err error) {
			if handle, err = mobyipvs.New(""); err == nil { // also without the module, which it loads if it can
				_, err = os.Stat("/proc/thread-self/net/ip_vs")
			}
			return err
		})
		if err != nil {
			lab.SkipOrFailModule(t, err)
		}
		defer handle.Close()
		server := &mobyipvs.Service{Address: net.IPv4(192, 0, 2, 1), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: "rr", AddressFamily: unix.AF_INET, Netmask: 0xffffffff}
		to := &mobyipvs.Destination{Address: net.IPv4(192, 0, 2, 2), Port: 80, Weight: 1, AddressFamily: unix.AF_INET}
		shows(t, func() error { return handle.NewService(server) }, func() error { return handle.DelService(server) })
		do(func() error { return handle.NewService(server) })
		shows(t, func() error { return handle.NewDestination(server, to) }, func() error { return handle.DelDestination(server, to) })
		// One that is being drained is as if it were gone.
		before := state()
		to.Weight = 0
		do(func() error { return handle.NewDestination(server, to) })
		if after := state(); after != before {
			t.Errorf("a destination of weight 0 shows:\n%s", cmp.Diff(before, after))
		}
	})
}
