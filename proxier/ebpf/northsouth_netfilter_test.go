// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestConnectionsOfNetfilter: connections that netfilter translates continue when the programs
// begin to serve, both to addresses of Services and to those that the programs would reject. The
// programs ignore connections that foreign rules translate.
func TestConnectionsOfNetfilter(t *testing.T) {
	kernel.Needs(t, capabilities.ConntrackLookup)
	e := newEdge(t, Options{})
	serve(t, e.here)
	serve(t, e.there)
	unserved := [...]netip.AddrPort{netip.MustParseAddrPort("10.96.7.7:80"), netip.MustParseAddrPort("[fd00:10:96::7777]:80")}
	for _, a := range unserved {
		if err := e.lab.Announce(netip.PrefixFrom(a.Addr(), a.Addr().BitLen()), e.at); err != nil {
			t.Fatal(err)
		}
	}
	type target struct {
		what string
		to   netip.AddrPort
		ours bool // to an address that the programs serve or reject
	}
	var targets []target
	for i, own := range e.addrs() {
		targets = append(targets,
			target{"a NodePort", netip.AddrPortFrom(own, nodePort), true},
			target{"an unallocated ClusterIP", unserved[i], true},
			target{"a foreign port", netip.AddrPortFrom(own, 8088), false})
	}
	var rules [proxier.Families]strings.Builder
	for _, n := range targets {
		for _, network := range []string{"udp", "tcp"} {
			fmt.Fprintf(&rules[proxier.FamilyOf(n.to.Addr())], "-A PREROUTING -d %s -p %s --dport %d -j DNAT --to-destination %s\n",
				n.to.Addr(), network, n.to.Port(), netip.AddrPortFrom(addrOf(e.here.Sandbox, n.to.Addr()), targetPort))
		}
	}
	for f, tool := range []string{"iptables-nft-restore", "ip6tables-nft-restore"} {
		cmd := e.at.Command(context.Background(), tool)
		cmd.Stdin = strings.NewReader("*nat\n:PREROUTING ACCEPT\n" + rules[f].String() + "COMMIT\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", tool, err, out)
		}
	}

	if err := e.at.Do(func() error { _, err := datapath.DetachDevices(); return err }); err != nil {
		t.Fatal(err)
	}
	visits := map[target][]*visit{}
	for _, n := range targets {
		for _, network := range []string{"udp", "tcp"} {
			visits[n] = append(visits[n], e.visit(t, entry{network, n.what, n.to}))
		}
	}
	e.UpdateFacts(func(f *proxier.Facts) { f.ServiceCIDRs = []netip.Prefix{lab.ServicePrefix4, lab.ServicePrefix6} })
	e.use(t, e.there)
	if err := e.tier.ensureDevices(t.Context()); err != nil {
		t.Fatal(err)
	}

	counts := counted{tier: e.tier}
	counts.since(t)
	for n, list := range visits {
		for _, v := range list {
			v.want(t, "here")
		}
		if got := counts.since(t)["passed_netfilter"]; (got > 0) != n.ours {
			t.Errorf("%s: %d packets to %s are counted as passed to netfilter", n.to, got, n.what)
		}
	}
	// New connections are translated by the programs.
	for _, network := range []string{"tcp", "udp"} {
		for _, own := range e.addrs() {
			e.visit(t, entry{network, "node port", netip.AddrPortFrom(own, nodePort)}).want(t, "there")
		}
	}
}

// TestRepliesFromOutside: netfilter masquerades connections of pods and of the host with any port from 1024 on, also
// with one that is a NodePort. Their replies are no requests to the NodePort.
func TestRepliesFromOutside(t *testing.T) {
	kernel.Needs(t, capabilities.ConntrackLookup)
	e := newEdge(t, Options{})
	e.use(t, serve(t, e.there)) // which would get them
	const port = 8443
	if _, err := e.client.ServeTCP(port); err != nil {
		t.Fatal(err)
	}
	if _, err := e.client.ServeUDP(port); err != nil {
		t.Fatal(err)
	}
	rules := e.at.Command(t.Context(), "nft", "-f", "-")
	rules.Stdin = strings.NewReader(fmt.Sprintf(`table inet test { chain postrouting { type nat hook postrouting priority 100
		ip protocol { tcp, udp } th dport %[1]d snat ip to %[2]s:%[4]d
		meta nfproto ipv6 meta l4proto { tcp, udp } th dport %[1]d snat ip6 to [%[3]s]:%[4]d
	}
	}`, port, e.at.Addr4, e.at.Addr6, nodePort))
	if out, err := rules.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	pod := e.at.Pod("client")
	for _, network := range []string{"tcp", "udp"} {
		for _, own := range e.addrs() {
			to := netip.AddrPortFrom(addrOf(e.client.Sandbox, own), port)
			for _, from := range []*lab.Sandbox{pod.Sandbox, e.at.Sandbox} {
				r, err := from.Ask(t.Context(), network, to)
				if err != nil || r.Peer != netip.AddrPortFrom(own, nodePort) {
					t.Errorf("%s to %s of %s, masqueraded: %v %v", network, to, from.Name, r, err)
				}
				if err := e.at.Command(t.Context(), "conntrack", "-D", "-p", network, "--dport", fmt.Sprint(port), "-f", [...]string{"ipv4", "ipv6"}[proxier.FamilyOf(own)]).Run(); err != nil {
					t.Fatal(err) // the next one is to get the same port
				}
			}
			e.visit(t, entry{network, "node port", netip.AddrPortFrom(own, nodePort)}).want(t, "there")
		}
	}
}

// TestConnectionsOfHost: a TCP connection of the host from a port that becomes a NodePort goes on, also where no rule
// has conntrack know it; so does one to a server of the host at that port.
func TestConnectionsOfHost(t *testing.T) {
	for name, connect := range map[string]func(e *edge, own netip.Addr) (net.Conn, error){
		"to outside": func(e *edge, own netip.Addr) (net.Conn, error) {
			return e.at.DialFrom(t.Context(), "tcp", nodePort, netip.AddrPortFrom(addrOf(e.client.Sandbox, own), nodePort))
		},
		"from outside": func(e *edge, own netip.Addr) (net.Conn, error) {
			return e.client.Dial(t.Context(), "tcp", netip.AddrPortFrom(own, nodePort))
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEdge(t, Options{})
			serve(t, e.there) // which would get its packets
			server := e.client.Sandbox
			if name == "from outside" {
				server = e.at.Sandbox
			}
			if _, err := server.ServeTCP(nodePort); err != nil {
				t.Fatal(err)
			}
			if err := e.at.Do(func() error { _, err := datapath.DetachDevices(); return err }); err != nil {
				t.Fatal(err)
			}
			var conns []net.Conn
			for _, own := range e.addrs() {
				c, err := connect(e, own)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				conns = append(conns, c)
			}
			e.use(t, e.there)
			if err := e.tier.ensureDevices(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, c := range conns {
				if r, err := lab.AskConn(t.Context(), c); err != nil || r.Server != server.Name {
					t.Errorf("%s to %s: %v %v", c.LocalAddr(), c.RemoteAddr(), r, err)
				}
			}
			for _, own := range e.addrs() {
				e.visit(t, entry{"tcp", "node port", netip.AddrPortFrom(own, nodePort)}).want(t, "there")
			}
		})
	}
}

// TestPortsOfOldConnections: while programs serve established connections only, netfilter may
// give the port of such a connection to another one towards the same backend. Both work.
func TestPortsOfOldConnections(t *testing.T) {
	opts := Options{Sizes: drainSizes}
	e := newEdge(t, opts)
	e.use(t, serve(t, e.there))
	var open []*visit
	for _, n := range e.entries() {
		if n.to.Port() == nodePort {
			open = append(open, e.visit(t, n))
		}
	}
	e.drain(t, opts)
	e.leavesNew(t)
	for _, v := range open {
		const foreign = 8088
		backend := netip.AddrPortFrom(addrOf(e.there.Sandbox, v.entry.to.Addr()), targetPort)
		tool := [...]string{"iptables-nft-restore", "ip6tables-nft-restore"}[proxier.FamilyOf(backend.Addr())]
		cmd := e.at.Command(t.Context(), tool)
		cmd.Stdin = strings.NewReader(fmt.Sprintf("*nat\n-A PREROUTING -p %[1]s --dport %[2]d -j DNAT --to-destination %[3]s\n"+
			"-A POSTROUTING -p %[1]s -d %[4]s -j MASQUERADE --to-ports %[5]d\nCOMMIT\n", v.entry.network, foreign, backend, backend.Addr(), v.seen(t).Port()))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", tool, err, out)
		}
		to := netip.AddrPortFrom(v.entry.to.Addr(), foreign)
		switch r, err := e.client.Ask(t.Context(), v.entry.network, to); {
		case err != nil:
			t.Errorf("a connection to %s with the port of %s: %v", to, v.entry, err)
		case r.Server != "there" || r.Peer == v.seen(t):
			t.Errorf("a connection to %s: %s sees %s, as with %s", to, r.Server, r.Peer, v.entry)
		}
		v.want(t, "there")
	}
}
