// SPDX-License-Identifier: Apache-2.0

//go:build linux

package staleudp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/test/lab"
)

// Address plan: that of the lab. Clients are the pod shell, which reaches Services by
// the rules of its node; what is not translated there is lost beyond it.

const (
	servicePort, nodePort = 53, 30053
	backendPort           = 5353
)

// cluster is a node with backends a and b, a client, and a Reconciler.
type cluster struct {
	testing.TB
	family      proxier.Family
	node        *lab.Node
	a, b, shell *lab.Pod
	r           *staleudp.Reconciler
}

func eachFamily(t *testing.T, test func(t *testing.T, c *cluster)) {
	for family := range proxier.Families {
		t.Run(family.String(), func(t *testing.T) {
			n := lab.NewT(t, lab.Options{Nodes: lab.NodeSettings{Conntrack: true}}).Node("node1")
			c := &cluster{TB: t, family: family, node: n, a: n.Pod("a"), b: n.Pod("b"), shell: n.Pod("shell")}
			for _, p := range []*lab.Pod{c.a, c.b} {
				if _, err := p.ServeUDP(backendPort); err != nil {
					t.Fatal(err)
				}
				if _, err := p.ServeTCP(backendPort); err != nil {
					t.Fatal(err)
				}
			}
			c.r = staleudp.New(staleudp.Options{Table: conntrack.Kernel{}, Exclusive: true})
			test(t, c)
		})
	}
}

func (c *cluster) addr(s *lab.Sandbox) netip.Addr {
	if c.family == proxier.IPv4 {
		return s.Addr4
	}
	return s.Addr6
}

func (c *cluster) serviceIP(n byte) netip.Addr {
	a := netip.MustParseAddr([...]string{"10.96.0.0", "fd00:10:96::"}[c.family])
	for range n {
		a = a.Next()
	}
	return a
}

// vip is the n-th ClusterIP with its port, nodePort the NodePort at the node.
func (c *cluster) vip(n byte) netip.AddrPort { return netip.AddrPortFrom(c.serviceIP(n), servicePort) }

func (c *cluster) atNode(port uint16) netip.AddrPort {
	return netip.AddrPortFrom(c.addr(c.node.Sandbox), port)
}

func (c *cluster) wildcard() netip.AddrPort {
	return netip.AddrPortFrom([...]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[c.family], nodePort)
}

// translate has the node translate these destinations, of UDP and TCP, to a pod,
// and nothing else.
func (c *cluster) translate(rules map[netip.AddrPort]*lab.Pod) {
	c.Helper()
	b := bytes.NewBufferString("*nat\n:PREROUTING ACCEPT\n")
	for to, p := range rules {
		for _, protocol := range []string{"udp", "tcp"} {
			fmt.Fprintf(b, "-A PREROUTING -d %s -p %s --dport %d -j DNAT --to-destination %s\n",
				to.Addr(), protocol, to.Port(), netip.AddrPortFrom(c.addr(p.Sandbox), backendPort))
		}
	}
	b.WriteString("COMMIT\n")
	c.restore(b)
}

func (c *cluster) restore(rules *bytes.Buffer) {
	c.Helper()
	text := rules.String()
	cmd := c.node.Command(bg, [...]string{"iptables-nft-restore", "ip6tables-nft-restore"}[c.family])
	cmd.Stdin = rules
	if out, err := cmd.CombinedOutput(); err != nil {
		c.Fatalf("restore: %v\n%s\n%s", err, out, text)
	}
}

// decide makes a decision about frontends and the pods behind them.
func (c *cluster) decide(frontends []netip.AddrPort, pods ...*lab.Pod) *proxier.Decision {
	var words []string
	for _, f := range frontends {
		kind := "clusterip"
		if f.Addr().IsUnspecified() {
			kind = "nodeport"
		}
		words = append(words, kind, f.String())
	}
	for _, p := range pods {
		words = append(words, "backend", netip.AddrPortFrom(c.addr(p.Sandbox), backendPort).String())
	}
	return udp("service", strings.Join(words, " "))
}

// reconcile lets the Reconciler know of all decisions there are.
func (c *cluster) reconcile(want int, all ...*proxier.Decision) {
	c.Helper()
	u := full(all...)
	local := []netip.Addr{c.addr(c.node.Sandbox)}
	u.NodeRules = &proxier.NodeRules{LocalAddrs: local, NodePortAddrs: local, Unserved: rules.Unserved}
	c.r.Observe(u)
	var deleted int
	err := c.node.Do(func() (err error) {
		deleted, err = reconcileAll(c.r)
		return err
	})
	if err != nil {
		c.Fatal(err)
	}
	if deleted != want {
		c.Errorf("deleted %d entries, want %d", deleted, want)
	}
}

// dial opens a client with a port of its own.
func (c *cluster) dial(network string, port uint16, to netip.AddrPort) net.Conn {
	c.Helper()
	conn, err := c.shell.DialFrom(bg, network, port, to)
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { _ = conn.Close() })
	return conn
}

// answered wants one datagram, the next one, to be answered by a pod.
func (c *cluster) answered(conn net.Conn, by *lab.Pod) {
	c.Helper()
	r, err := lab.AskConn(bg, conn)
	if err != nil {
		c.Errorf("%s: %v, want an answer by %s", conn.RemoteAddr(), err, by.Name)
	} else if r.Server != by.Name {
		c.Errorf("%s: answered by %s, want %s", conn.RemoteAddr(), r.Server, by.Name)
	}
}

// unanswered wants none for a datagram.
func (c *cluster) unanswered(conn net.Conn) {
	c.Helper()
	ctx, cancel := context.WithTimeout(bg, 200*time.Millisecond)
	defer cancel()
	if r, err := lab.AskConn(ctx, conn); err == nil {
		c.Errorf("%s: answered by %s, want no answer", conn.RemoteAddr(), r.Server)
	}
}

// entry returns the entry of a client, if there is one.
func (c *cluster) entry(conn net.Conn) (found conntrack.Flow) {
	c.Helper()
	port := netip.MustParseAddrPort(conn.LocalAddr().String()).Port()
	for _, f := range flows(c, c.node.Sandbox, c.family) {
		if f.Source.Port() == port {
			found = f
		}
	}
	return found
}

func flows(tb testing.TB, s *lab.Sandbox, family proxier.Family) (list []conntrack.Flow) {
	tb.Helper()
	err := s.Do(func() error {
		for f, err := range (conntrack.Kernel{}).Flows(bg, family) {
			if err != nil {
				return err
			}
			if f.Protocol == proxier.UDP { // old kernels list all
				list = append(list, f)
			}
		}
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return list
}

// kept wants the very entry still to be there.
func (c *cluster) kept(conn net.Conn, entry conntrack.Flow) {
	c.Helper()
	if got := c.entry(conn); got != entry || entry.ID == 0 {
		c.Errorf("the entry %v (id %d) is %v (id %d) by now", entry, entry.ID, got, got.ID)
	}
}

// TestRemovedBackend: a client that keeps sending from one port comes to the backend
// that is left, with its next datagram; no other client loses an entry.
func TestRemovedBackend(t *testing.T) {
	eachFamily(t, func(t *testing.T, c *cluster) {
		to := []netip.AddrPort{c.vip(1), c.atNode(nodePort), c.atNode(8053), c.vip(9)}
		frontends := []netip.AddrPort{c.vip(1), c.wildcard()}
		other := udp("other", "clusterip "+c.vip(9).String()+" backend "+netip.AddrPortFrom(c.addr(c.a.Sandbox), backendPort).String())
		all := func(p *lab.Pod) map[netip.AddrPort]*lab.Pod {
			return map[netip.AddrPort]*lab.Pod{to[0]: p, to[1]: p, to[2]: c.a, to[3]: c.a}
		}

		c.translate(all(c.a))
		var stuck []net.Conn
		for i, a := range to {
			conn := c.dial("udp", uint16(4000+i), a)
			c.answered(conn, c.a)
			stuck = append(stuck, conn)
		}
		tcp := c.dial("tcp", 4000, to[0])
		c.answered(tcp, c.a)
		// The first run of a process is one of those that break nothing.
		healthy := c.entry(stuck[0])
		c.reconcile(0, c.decide(frontends, c.a, c.b), other)
		c.kept(stuck[0], healthy)

		c.translate(all(c.b))
		var fine []net.Conn
		var entries []conntrack.Flow
		for i, a := range to[:2] {
			conn := c.dial("udp", uint16(5000+i), a)
			c.answered(conn, c.b)
			fine = append(fine, conn)
		}
		fine = append(fine, stuck[2:]...) // a hostPort, and a Service that still has the backend
		for _, conn := range fine {
			entries = append(entries, c.entry(conn))
		}
		for _, conn := range stuck[:2] {
			c.answered(conn, c.a) // or there would be nothing to do
		}

		c.reconcile(2, c.decide(frontends, c.b), other)
		for _, conn := range stuck[:2] {
			c.answered(conn, c.b)
		}
		for i, conn := range fine {
			c.kept(conn, entries[i])
		}
		c.answered(tcp, c.a)
	})
}

// TestNoBackendLeft: a Service without backends keeps no client.
func TestNoBackendLeft(t *testing.T) {
	eachFamily(t, func(t *testing.T, c *cluster) {
		frontends := []netip.AddrPort{c.vip(1), c.wildcard()}
		c.translate(map[netip.AddrPort]*lab.Pod{c.vip(1): c.a, c.atNode(nodePort): c.a})
		clients := []net.Conn{c.dial("udp", 4000, c.vip(1)), c.dial("udp", 4001, c.atNode(nodePort))}
		for _, conn := range clients {
			c.answered(conn, c.a)
		}
		c.reconcile(0, c.decide(frontends, c.a))
		c.translate(nil)
		c.reconcile(2, c.decide(frontends))
		for _, conn := range clients {
			c.unanswered(conn)
		}

		// They began without a translation now; that must not be how they stay.
		for _, conn := range clients {
			if f := c.entry(conn); f.ID == 0 || f.Translated() {
				t.Errorf("the client's entry is %v", f)
			}
		}
		c.translate(map[netip.AddrPort]*lab.Pod{c.vip(1): c.b, c.atNode(nodePort): c.b})
		for _, conn := range clients {
			c.unanswered(conn)
		}
		c.reconcile(2, c.decide(frontends, c.b))
		for _, conn := range clients {
			c.answered(conn, c.b)
		}
	})
}

// TestTooEarly: who called a Service while nothing served it is not locked out by the entry of that
// call afterwards.
func TestTooEarly(t *testing.T) {
	eachFamily(t, func(t *testing.T, c *cluster) {
		c.r = staleudp.New(staleudp.Options{Table: conntrack.Kernel{}, Opening: conntrack.Kernel{}.Opening})
		service := makeDecision("service", proxier.TCP, "clusterip "+c.vip(1).String()+" backend "+netip.AddrPortFrom(c.addr(c.a.Sandbox), backendPort).String())
		c.translate(map[netip.AddrPort]*lab.Pod{c.vip(9): c.a}) // conntrack is on
		call := func(to netip.AddrPort, port uint16) error {
			ctx, cancel := context.WithTimeout(bg, 200*time.Millisecond)
			defer cancel()
			conn, err := c.shell.DialFrom(ctx, "tcp", port, to)
			if err == nil {
				err = conn.Close()
			}
			return err
		}
		for port := uint16(4000); port < 4003; port++ {
			if call(c.vip(1), port) == nil || call(c.vip(2), port) == nil {
				t.Fatal("an address that nothing serves is answered")
			}
		}
		c.translate(map[netip.AddrPort]*lab.Pod{c.vip(1): c.a, c.vip(9): c.a})
		if call(c.vip(1), 4000) == nil {
			t.Error("the entry of the first call does no harm, so nothing is tested")
		}
		open := c.dial("tcp", 4010, c.vip(1))
		c.reconcile(3, service)
		if err := call(c.vip(1), 4001); err != nil {
			t.Errorf("after the start: %v", err)
		}
		c.answered(open, c.a)
		c.reconcile(0, service)
	})
}

// TestDeletedService: what goes to a Service that is deleted ends; while a process
// runs, or before.
func TestDeletedService(t *testing.T) {
	eachFamily(t, func(t *testing.T, c *cluster) {
		for _, running := range []bool{true, false} {
			c.translate(map[netip.AddrPort]*lab.Pod{c.vip(1): c.a, c.atNode(nodePort): c.a, c.atNode(8053): c.a})
			clients := []net.Conn{c.dial("udp", 4000, c.vip(1)), c.dial("udp", 4001, c.atNode(nodePort)), c.dial("udp", 4002, c.atNode(8053))}
			for _, conn := range clients {
				c.answered(conn, c.a)
			}
			gone := clients[:2]
			if !running {
				gone = gone[:1] // of what served a NodePort before this process, nothing is known
			}
			kept := clients[len(gone):]
			var entries []conntrack.Flow
			for _, conn := range kept {
				entries = append(entries, c.entry(conn))
			}
			if running {
				c.reconcile(0, c.decide([]netip.AddrPort{c.vip(1), c.wildcard()}, c.a))
			} else {
				c.r = staleudp.New(staleudp.Options{Table: conntrack.Kernel{}, Exclusive: true})
			}
			c.translate(nil)
			c.reconcile(len(gone))
			for _, conn := range gone {
				c.unanswered(conn)
			}
			for i, conn := range kept {
				c.kept(conn, entries[i])
			}
			for _, conn := range clients {
				_ = conn.Close()
			}
			c.flush()
		}
	})
}

func (c *cluster) flush() {
	c.Helper()
	if err := conntracker(c, c.node.Sandbox).ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		c.Fatal(err)
	}
}

// conntracker is the netlink library's conntrack of a sandbox.
func conntracker(tb testing.TB, s *lab.Sandbox) (h *netlink.Handle) {
	tb.Helper()
	err := s.Do(func() (err error) {
		h, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(h.Close)
	return h
}

// TestOtherZone: connections in another conntrack zone are not touched, even where they
// look like it.
func TestOtherZone(t *testing.T) {
	eachFamily(t, func(t *testing.T, c *cluster) {
		c.restore(bytes.NewBufferString("*raw\n-A PREROUTING -p udp --sport 4001 -j CT --zone 7\n" +
			"-A PREROUTING -p udp --sport 4002 -j CT --zone-orig 8\nCOMMIT\n"))
		c.translate(map[netip.AddrPort]*lab.Pod{c.vip(1): c.a})
		zones := []uint16{0, 7, 8}
		for i := range zones {
			// Their replies are in zone 0, and so are not translated back.
			conn := c.dial("udp", uint16(4000+i), c.vip(1))
			ctx, cancel := context.WithTimeout(bg, 200*time.Millisecond)
			_, _ = lab.AskConn(ctx, conn)
			cancel()
		}
		has := func() (list []uint16) {
			for _, f := range flows(t, c.node.Sandbox, c.family) {
				if f.Destination == c.vip(1) {
					list = append(list, f.Zone)
				}
			}
			slices.Sort(list)
			return list
		}
		if diff := cmp.Diff(zones, has()); diff != "" {
			t.Fatalf("zones of entries (-want +got):\n%s", diff)
		}
		c.reconcile(1)
		if diff := cmp.Diff(zones[1:], has()); diff != "" {
			t.Errorf("zones of entries left (-want +got):\n%s", diff)
		}
	})
}

// TestDelete deletes exactly what it is told: not an entry that has the same
// addresses and is another one, and no more if one is gone already.
func TestDelete(t *testing.T) {
	s := lab.NewT(t).Client("table").Sandbox
	const entries = 200 // several messages
	fill(t, s, entries)
	list := flows(t, s, proxier.IPv4)
	if len(list) != entries {
		t.Fatalf("%d entries, want %d", len(list), entries)
	}
	doomed := slices.Clone(list[:150])
	doomed[3].ID++
	doomed[70].Source = netip.AddrPortFrom(doomed[70].Source.Addr(), 1)
	deleted := -1
	err := s.Do(func() (err error) {
		deleted, err = conntrack.Kernel{}.Delete(bg, doomed)
		return err
	})
	if err != nil || deleted != 148 {
		t.Errorf("deleted %d with error %v, want 148", deleted, err)
	}
	want := append([]conntrack.Flow{list[3], list[70]}, list[150:]...)
	got := flows(t, s, proxier.IPv4)
	order := func(a, b conntrack.Flow) int { return a.Source.Compare(b.Source) }
	slices.SortFunc(want, order)
	slices.SortFunc(got, order)
	if !slices.Equal(want, got) {
		t.Errorf("entries left: %v, want %v", got, want)
	}
	all, err := conntracker(t, s).ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil || len(all) != len(want)+entries {
		t.Errorf("%d entries with those of TCP and error %v, want %d", len(all), err, len(want)+entries)
	}
}

// TestCancelled: a cancelled context ends a dump with its error.
func TestCancelled(t *testing.T) {
	s := lab.NewT(t).Client("table").Sandbox
	fill(t, s, 1)
	ctx, cancel := context.WithCancel(bg)
	cancel()
	err := s.Do(func() error {
		for _, err := range (conntrack.Kernel{}).Flows(ctx, proxier.IPv4) {
			return err
		}
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that of the context", err)
	}
}

// fill creates UDP entries to 10.96.0.1:53, translated to one of 256 backends, and a
// TCP entry for each in the same way.
func fill(tb testing.TB, s *lab.Sandbox, n int) {
	tb.Helper()
	h := conntracker(tb, s)
	for i := range n {
		for _, protocol := range []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			client, vip, backend := net.IPv4(198, 51, byte(i>>16), byte(i>>8)).To4(), net.IPv4(10, 96, 0, 1).To4(), net.IPv4(10, 244, 0, byte(i)).To4()
			port := uint16(1024 + i&255)
			f := &netlink.ConntrackFlow{
				FamilyType: unix.AF_INET, TimeOut: 600,
				Forward: netlink.IPTuple{SrcIP: client, DstIP: vip, SrcPort: port, DstPort: servicePort, Protocol: protocol},
				Reverse: netlink.IPTuple{SrcIP: backend, DstIP: client, SrcPort: backendPort, DstPort: port, Protocol: protocol},
			}
			if protocol == unix.IPPROTO_TCP {
				f.ProtoInfo = &netlink.ProtoInfoTCP{State: 3} // established
			}
			if err := h.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, f); err != nil {
				tb.Fatal(os.NewSyscallError("create entry", err))
			}
		}
	}
}
