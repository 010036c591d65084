// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestPacketCounters: rules count real packets, those that conntrack finds invalid and are
// dropped, in both families, and connections to NodePorts at loopback addresses, and no others.
// The numbers go on with the next process, and --cleanup takes the counters away unless others
// use them.
func TestPacketCounters(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			n := newLabNode(t, v)
			tools := n.tools.Tools.(*labTools)
			at := tools.at
			web, shell := at.Pod("web"), at.Pod("shell")
			if _, err := web.ServeTCP(8080); err != nil {
				t.Fatal(err)
			}
			policy := proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}}
			n.open(testFacts, policy)
			if err := n.tier.(*Tier).uncounted[proxier.IPv4]; err != nil {
				lab.SkipOrFailModule(t, err)
			}
			n.OnServiceAdd(service(0, nodePort(30080)))
			n.OnEndpointSliceAdd(endpoints(0, web.Addr4.String()))
			n.OnServiceAdd(service(1, nodePort(30081), externalLocal))
			n.OnEndpointSliceAdd(endpoints(1, web.Addr4.String()))
			n.sync()

			var want Counted
			check := func(when string) {
				t.Helper()
				deadline := time.Now().Add(5 * time.Second)
				for { // what was sent takes its time
					got, ok, err := n.tier.(*Tier).Counted()
					if err != nil || !ok {
						t.Fatalf("%s: %v, %v", when, ok, err)
					}
					if got == want {
						return
					}
					if time.Now().After(deadline) {
						t.Fatalf("%s: %+v, want %+v", when, got, want)
					}
				}
			}
			check("nothing yet")

			ask := func(from *lab.Sandbox, to string) {
				t.Helper()
				if reply, err := from.Ask(t.Context(), "tcp", netip.MustParseAddrPort(to)); err != nil || reply.Server != "web" {
					t.Fatalf("%s: %+v, %v", to, reply, err)
				}
			}
			for _, to := range []string{"127.0.0.1:30080", "127.1.2.3:30080", "127.0.0.1:30081"} {
				ask(at.Sandbox, to)
				want.LoopbackNodePorts++
			}
			check("NodePorts at loopback addresses")
			for _, to := range []string{"172.18.0.1:30080", "10.96.0.1:80"} {
				ask(at.Sandbox, to)
				ask(shell.Sandbox, to)
			}

			gateway, err := at.Netlink().LinkByName("pod2")
			if err != nil {
				t.Fatal(err)
			}
			// A reset of a connection that nobody knows.
			reset := func(src, dst netip.Addr) {
				t.Helper()
				p := packet.NewTCP(netip.AddrPortFrom(src, 40000), netip.AddrPortFrom(dst, 8080), packet.RST, nil)
				p.Ethernet = &packet.Ethernet{Dst: packet.MAC(gateway.Attrs().HardwareAddr)}
				if err := shell.SendFrame("eth0", p.Build()); err != nil {
					t.Fatal(err)
				}
				want.InvalidDropped++
			}
			reset(shell.Addr4, web.Addr4)
			reset(shell.Addr6, web.Addr6)
			reset(shell.Addr6, web.Addr6)
			check("invalid packets, and other connections")

			n.open(testFacts, policy)
			n.OnServiceAdd(service(0, nodePort(30080)))
			n.OnEndpointSliceAdd(endpoints(0, web.Addr4.String()))
			n.sync()
			ask(at.Sandbox, "127.0.0.1:30080")
			want.LoopbackNodePorts++
			check("the next process")

			remove := func() {
				t.Helper()
				if err := at.Do(func() error { return RemoveCounters(t.Context(), nfacct.Kernel{}) }); err != nil {
					t.Fatal(err)
				}
			}
			remove()
			check("removed while rules name them")
			const theirs = "*filter\n-A FORWARD -m nfacct --nfacct-name " + loopbackCounter + "\nCOMMIT\n"
			n.restore(proxier.IPv6, theirs)
			if err := n.tier.Cleanup(t.Context()); err != nil {
				t.Fatal(err)
			}
			check("without rules of ours")
			remove()
			if _, err := tools.Packets(invalidCounter); !errors.Is(err, nfacct.ErrNotFound) {
				t.Errorf("after it was removed: %v", err)
			}
			if _, err := tools.Packets(loopbackCounter); err != nil {
				t.Errorf("what a rule of somebody else names: %v", err)
			}
			n.restore(proxier.IPv6, strings.Replace(theirs, "-A", "-D", 1))
			remove()
			if _, err := tools.Packets(loopbackCounter); !errors.Is(err, nfacct.ErrNotFound) {
				t.Errorf("after nobody names it: %v", err)
			}
		})
	}
}

// TestNoCounters: where a kernel has no counters, or no match that names them, rules are
// written without, and nothing is said to have been counted.
func TestNoCounters(t *testing.T) {
	for name, tc := range map[string]struct {
		refuse func(input string) error
		lack   func(*Options)
	}{
		"no object": {lack: func(o *Options) { o.Counters = noCounters{o.Counters} }},
		"no match": {refuse: func(input string) error {
			if strings.Contains(input, "nfacct") {
				return errors.New("no such match")
			}
			return nil
		}},
		"not wanted": {lack: func(o *Options) { o.Counters = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			fake := newFakeTools()
			n := &node{t: t, tools: &watchedTools{Tools: fake, before: tc.refuse}}
			opts := n.options()
			opts.Flows = nil // there is no kernel that has any
			if tc.lack != nil {
				tc.lack(&opts)
			}
			tier, err := Open(t.Context(), opts)
			if err != nil {
				t.Fatal(err)
			}
			defer tier.Close()
			if c, ok, err := tier.Counted(); ok || err != nil {
				t.Errorf("counted %+v, %v", c, err)
			}
			n.start(fakeTierOf(tier), testFacts, proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}})
			n.OnServiceAdd(service(0, nodePort(30080)))
			n.OnEndpointSliceAdd(endpoints(0, "10.244.1.5"))
			n.sync()
			for f := range proxier.Families {
				text := saved(t, n.tools, f)
				if strings.Contains(text, "nfacct") || !strings.Contains(text, "--ctstate INVALID -j DROP") {
					t.Errorf("%s:\n%s", f, text)
				}
			}
		})
	}
}

// noCounters are those of a kernel without.
type noCounters struct{ Counters }

func (noCounters) Ensure(string) error { return nfacct.ErrNotSupported }

// fakeTierOf writes what a Tier would, and leaves this host's settings alone.
func fakeTierOf(t *Tier) *fakeTier { return &fakeTier{t.opts, t.rules} }

// TestCountersComeBack: counters that somebody deleted with all rules are there again after a
// full sync, which would be refused without them.
func TestCountersComeBack(t *testing.T) {
	fake := newFakeTools()
	n := newNode(t, fake)
	n.serve(0, 3, 2)
	n.sync()
	before := saved(t, n.tools, proxier.IPv4)
	for f := range proxier.Families {
		n.restore(f, "*filter\n-F KUBE-FORWARD\nCOMMIT\n*nat\n-F KUBE-MARK-MASQ\nCOMMIT\n")
	}
	for _, name := range counterNames {
		if err := fake.Delete(name); err != nil {
			t.Fatal(err)
		}
	}
	n.syncAll()
	if after := saved(t, n.tools, proxier.IPv4); after != before {
		t.Errorf("it was\n%s\nand is\n%s", before, after)
	}
}
