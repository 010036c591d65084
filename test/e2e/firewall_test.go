// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
)

// firewalld is what its zone public with a forward policy has of hook forward, with the backend
// nftables.
const firewalld = `table inet firewalld
delete table inet firewalld
table inet firewalld {
	chain filter_FORWARD {
		type filter hook forward priority 10; policy accept;
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ip6 daddr { ::/96, ::ffff:0.0.0.0/96 } reject with icmpv6 type addr-unreachable
		jump filter_FORWARD_ZONES
		ct state invalid drop
		reject with icmpx admin-prohibited
	}
	chain filter_FORWARD_ZONES {
		iifname "eth0" goto filter_FWD_public
		goto filter_FWD_public
	}
	chain filter_FWD_public {
		ip saddr 10.244.0.0/16 accept
		ip6 saddr fd00:10:244::/48 accept
	}
}`

// forwardDrop is a FORWARD policy of DROP as a container runtime sets it, where pods are known by
// the sources of packets alone.
var forwardDrop = [...]string{
	"*filter\n:FORWARD DROP [0:0]\n-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A FORWARD -s 10.244.0.0/16 -j ACCEPT\nCOMMIT\n",
	"*filter\n:FORWARD DROP [0:0]\n-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A FORWARD -s fd00:10:244::/48 -j ACCEPT\n-A FORWARD -p ipv6-icmp -j ACCEPT\nCOMMIT\n",
}

// Firewalls of the host forward only connections that netfilter translates: firewalld, and a FORWARD
// policy of DROP, from which kube-proxy's rules exempt what they have marked. Clients outside reach
// endpoints on this node all the same, also while the firewall reloads and after it has let all packets
// to pods pass, so that programs serve again. No connection fails, and established ones continue.
func TestFirewalls(t *testing.T) {
	s := newStage(t, lab.Options{Nodes: lab.NodeSettings{Conntrack: true}})
	nft := func(text string) {
		t.Helper()
		cmd := s.node.Command(t.Context(), "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("nft: %v\n%s", err, out)
		}
	}
	iptables := func(texts ...string) {
		t.Helper()
		for i, tool := range []string{"iptables-nft-restore", "ip6tables-nft-restore"} {
			cmd := s.node.Command(t.Context(), tool, "--noflush")
			cmd.Stdin = strings.NewReader(texts[i])
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", tool, err, out)
			}
		}
	}
	served := func(by string, want int) {
		t.Helper()
		s.await(t, fmt.Sprintf("%s to be why rules serve %d frontends", by, want), func() error {
			_, body, err := s.node.Get(t.Context(), 10249, "/debug/carriers")
			if n := strings.Count(body, `"clients":"outside","carrier":"iptables","reason":"a firewall forwards only connections that netfilter translates: `+by); err == nil && n != want {
				err = fmt.Errorf("it is for %d: %s", n, body)
			}
			return err
		})
	}
	writeManifest(t, s.dir, "cidr.yaml", serviceCIDR)
	nft(firewalld)
	s.start("--ebpf-sync-period=1s", "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48")
	defer s.end()
	s.serves(t)
	served("chain filter_FORWARD in table inet firewalld of nf_tables", 12)
	w := lab.NewLoad(t)
	defer w.End()
	s.ask(w, gently)
	long := s.open()
	check := func() {
		t.Helper()
		w.More(500)
		checkAll(t, long)
	}
	check()
	for range 5 { // firewall-cmd --reload
		nft(firewalld)
		check()
	}
	if testing.Short() {
		w.End()
		few(t, w)
		return
	}
	nft("delete table inet firewalld")
	check()
	served("", 0)
	check()
	long = append(long, s.open()...) // by programs

	w.End() // for up to a second, the new firewall drops what programs translate
	few(t, w)
	iptables(forwardDrop[:]...)
	served("chain FORWARD in table ip filter of nf_tables", 6)
	served("chain FORWARD in table ip6 filter of nf_tables", 6)
	s.await(t, "rules to serve", func() error { return holds(t, s.node, ":KUBE-SVC-", true) })
	for name, to := range outside(s.node) { // programs leave them to rules after these are there
		s.await(t, name, func() error {
			_, err := s.far.Ask(t.Context(), name[:3], to)
			return err
		})
	}
	w = lab.NewLoad(t)
	defer w.End()
	s.ask(w, gently)
	check()
	long = append(long, s.open()...)
	check()
	// The CNI lets all packets to pods pass.
	iptables("*filter\n-I FORWARD -d 10.244.0.0/16 -j ACCEPT\nCOMMIT\n", "*filter\n-I FORWARD -d fd00:10:244::/48 -j ACCEPT\nCOMMIT\n")
	served("", 0)
	s.await(t, "programs to serve again", func() error { return holds(t, s.node, ":KUBE-SVC-", false) })
	check()
	w.End()
	few(t, w)
}

// With masqueradeLocalBackends, an endpoint on this node sees the node's address for clients outside,
// where externalTrafficPolicy is Cluster, and else the client's. Sockets are served by programs as before.
func TestMasqueradeLocalBackends(t *testing.T) {
	s := newStage(t)
	writeManifests(t, s.dir, loadBalancer, s.here)
	s.start("--ebpf-sync-period=1s", "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48", "--ebpf-masquerade-local-backends")
	defer s.end()
	for _, policy := range []string{"Cluster", "Local"} {
		writeManifests(t, s.dir, strings.Replace(loadBalancer, "Policy: Cluster", "Policy: "+policy, 1), s.here)
		for name, to := range outside(s.node) {
			s.await(t, fmt.Sprintf("%s with policy %s", name, policy), func() error {
				r, err := s.far.Ask(t.Context(), name[:3], to)
				client := r.Peer.Addr() == s.far.Addr4 || r.Peer.Addr() == s.far.Addr6
				if err == nil && client != (policy == "Local") {
					err = fmt.Errorf("the endpoint sees %s", r.Peer)
				}
				return err
			})
		}
		for name, to := range targets() {
			if r, err := s.client.Ask(t.Context(), name[:3], to); err != nil || r.Peer.Addr() != s.client.Addr4 && r.Peer.Addr() != s.client.Addr6 {
				t.Errorf("%s from a pod with policy %s: %v %v", name, policy, r, err)
			}
		}
	}
}
