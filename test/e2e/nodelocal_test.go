// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/test/lab"
)

// A device of the node gets the ClusterIP, a server listens there, and rules exempt UDP to it from
// translation, as NodeLocal DNSCache does. From then on, pods and the host reach the server by UDP,
// and the endpoints by TCP, which is translated by rules. Clients outside are served by programs all
// the time. When the device goes, all is as before. No connection fails.
func TestNodeLocalDNSCache(t *testing.T) {
	s := newStage(t)
	writeManifest(t, s.dir, "cidr.yaml", serviceCIDR)
	// What this host sends to the address has the same address as its source, so it is masqueraded.
	s.start("--ebpf-sync-period=1s", "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48")
	defer s.end()
	s.serves(t)
	w := lab.NewLoad(t)
	defer w.End()
	s.ask(w, gently)

	if _, err := s.node.ServeUDP(80); err != nil {
		t.Fatal(err)
	}
	untrack(t, s.node, "udp", vip4, vip6)
	hold := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "nodelocaldns"}, PeerName: "nodelocalpeer"} // not all kernels have dummy devices
	device := func() error {
		nl := s.node.Netlink()
		if err := nl.LinkAdd(hold); err != nil {
			return err
		}
		for _, a := range []netip.Addr{vip4.Addr(), vip6.Addr()} {
			addr, err := netlink.ParseAddr(netip.PrefixFrom(a, a.BitLen()).String())
			if err != nil {
				return err
			}
			if err := nl.AddrAdd(hold, addr); err != nil {
				return err
			}
		}
		return nl.LinkSetUp(hold)
	}
	for range 2 {
		if err := device(); err != nil {
			t.Fatal(err)
		}
		for _, from := range []*lab.Sandbox{s.client.Sandbox, s.node.Sandbox} {
			for name, to := range targets() {
				byServer := strings.HasPrefix(name, "udp")
				s.await(t, fmt.Sprintf("%s from %s to be left to rules", name, from.Name), func() error {
					for range 10 {
						r, err := from.Ask(t.Context(), name[:3], to)
						if err == nil && (r.Server == s.node.Name) != byServer {
							err = fmt.Errorf("%s answers", r.Server)
						}
						if err != nil {
							return err
						}
					}
					return nil
				})
			}
		}
		const says = `"carrier":"iptables","reason":"a device of this node has the ClusterIP`
		if _, body, err := s.node.Get(t.Context(), 10249, "/debug/carriers"); err != nil || strings.Count(body, says) != 4 {
			t.Errorf("of four ports at ClusterIPs, the datapaths are %s, error %v", body, err)
		}
		const explained = `a device of this node has the ClusterIP, as with NodeLocal DNSCache`
		if _, body, err := s.node.Get(t.Context(), 10249, "/debug/explain?src=127.0.0.1&dst=10.96.0.10:80"); err != nil || !strings.Contains(body, explained) {
			t.Errorf("explain does not say why: %s, error %v", body, err)
		}
		w.More(100)
		if err := s.node.Netlink().LinkDel(hold); err != nil {
			t.Fatal(err)
		}
		s.await(t, "no rules for the Service", func() error { return holds(t, s.node, ":KUBE-SVC-", false) })
		for name, to := range targets() {
			if r, err := s.client.Ask(t.Context(), name[:3], to); err != nil || r.Server == s.node.Name {
				t.Errorf("%s without the device: %v %v", name, r, err)
			}
		}
		w.More(100)
	}
	w.End()
	few(t, w)
}

// untrack exempts packets to these addresses from connection tracking, and so from translation.
func untrack(t testing.TB, n *lab.Node, protocol string, to ...netip.AddrPort) {
	t.Helper()
	for _, a := range to {
		tool := "iptables-nft-restore"
		if a.Addr().Is6() {
			tool = "ip6tables-nft-restore"
		}
		cmd := n.Command(t.Context(), tool, "--noflush")
		cmd.Stdin = strings.NewReader(strings.ReplaceAll("*raw\n-A PREROUTING RULE\n-A OUTPUT RULE\nCOMMIT\n", "RULE",
			fmt.Sprintf("-d %s -p %s --dport %d -j CT --notrack", a.Addr(), protocol, a.Port())))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", tool, err, out)
		}
	}
}
