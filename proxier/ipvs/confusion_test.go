// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios"
)

// IPVS knows a reply by the endpoint and the client's address and port alone, whatever
// conntrack knows of it. So a connection gets no answer if one that IPVS of any node on the
// way remembers, through another virtual server, had the same client and endpoint. Clients that
// take ports in turn do not meet that; where a node hides clients behind itself, netfilter takes
// a random port, which may be that of a connection of the node's own.

// half is one way of a connection, as both the kernel's tables have it.
type half struct{ endpoint, client netip.AddrPort }

// confusion says with which connection of IPVS an unanswered one to an address is confused; nothing
// if with none that is not in seen, where it adds what it finds.
func confusion(nodes []*lab.Node, protocol proxier.Protocol, to netip.AddrPort, seen map[half]bool) (with string, err error) {
	unanswered := map[half]bool{}
	for _, n := range nodes {
		err = errors.Join(err, n.Do(func() error { return addUnanswered(unanswered, protocol, to) }))
	}
	for _, n := range nodes {
		var text []byte
		err = errors.Join(err, n.Do(func() (err error) {
			text, err = os.ReadFile("/proc/thread-self/net/ip_vs_conn")
			return err
		}))
		remembered, bad := parseConnections(text)
		err = errors.Join(err, bad)
		for _, c := range remembered {
			if h := (half{c.endpoint, c.client}); c.protocol == protocol.String() && c.virtual != to && unanswered[h] && !seen[h] {
				seen[h] = true
				with = fmt.Sprintf("%s: %s", n.Name, c.line)
			}
		}
	}
	return with, err
}

// addUnanswered adds what conntrack knows of the flows to an address that got no reply, which it tells of
// TCP alone: how the client shows behind this node, and before it.
func addUnanswered(to map[half]bool, protocol proxier.Protocol, target netip.AddrPort) error {
	family := netlink.InetFamily(unix.AF_INET)
	if target.Addr().Is6() {
		family = unix.AF_INET6
	}
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
	if err != nil {
		return err
	}
	addrPort := func(ip net.IP, port uint16) netip.AddrPort {
		a, _ := netip.AddrFromSlice(ip)
		return netip.AddrPortFrom(a.Unmap(), port)
	}
	for _, f := range flows {
		if proxier.Protocol(f.Forward.Protocol) != protocol || addrPort(f.Forward.DstIP, f.Forward.DstPort) != target {
			continue
		}
		if tcp, ok := f.ProtoInfo.(*netlink.ProtoInfoTCP); ok && tcp.State != 1 { // TCP_CONNTRACK_SYN_SENT
			continue
		}
		endpoint := addrPort(f.Reverse.SrcIP, f.Reverse.SrcPort)
		to[half{endpoint, addrPort(f.Reverse.DstIP, f.Reverse.DstPort)}] = true
		to[half{endpoint, addrPort(f.Forward.SrcIP, f.Forward.SrcPort)}] = true
	}
	return nil
}

type connection struct {
	protocol                  string
	client, virtual, endpoint netip.AddrPort
	line                      string
}

// parseConnections reads /proc/net/ip_vs_conn: numbers are hexadecimal, as are addresses of IPv4.
func parseConnections(text []byte) (all []connection, err error) {
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Scan() // the heading
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 7 {
			return all, fmt.Errorf("line %q", lines.Text())
		}
		var addrs [3]netip.AddrPort
		for i := range addrs {
			a, bad := netip.ParseAddr(f[1+2*i])
			if bad != nil {
				var b []byte
				if b, bad = hex.DecodeString(f[1+2*i]); bad == nil {
					a, _ = netip.AddrFromSlice(b)
				}
			}
			port, worse := strconv.ParseUint(f[2+2*i], 16, 16)
			if bad = errors.Join(bad, worse); bad != nil {
				return all, fmt.Errorf("line %q: %w", lines.Text(), bad)
			}
			addrs[i] = netip.AddrPortFrom(a, uint16(port))
		}
		all = append(all, connection{f[0], addrs[0], addrs[1], addrs[2], lines.Text()})
	}
	return all, lines.Err()
}

// Confused implements live.Confuser.
func (s *scenarioTier) Confused(p scenarios.Probe) (with string, err error) {
	if s.confused == nil {
		s.confused = map[half]bool{}
	}
	return confusion(s.nodes, p.Protocol, p.To, s.confused)
}

// TestKernelConfusion: a client that another node hides behind itself, by the port of one of its own
// connections, gets no answer, and is known for it; others are answered, or fail for something else.
func TestKernelConfusion(t *testing.T) {
	s := newStage(t)
	s.begin()
	s.sync(true, s.service(s.web1))
	other := s.lab.Node("node2")
	shell := other.Pod("shell2")
	here, there := netip.AddrPortFrom(s.node.Addr4, 30080), netip.AddrPortFrom(other.Addr4, 30080)
	const port = 34567
	conn, err := other.DialFrom(t.Context(), "tcp", port, here)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	onOther := func(command string) {
		t.Helper()
		if out, err := other.Command(t.Context(), "sh", "-c", command).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
	}
	onOther(fmt.Sprintf("iptables -t nat -A PREROUTING -p tcp -d %s --dport 30080 -j DNAT --to %s:8080", there.Addr(), s.web1.Addr4))
	hideBehind := func(port int) {
		t.Helper()
		onOther(fmt.Sprintf("iptables -t nat -F POSTROUTING; iptables -t nat -A POSTROUTING -p tcp --dport 8080 -j MASQUERADE --to-ports %d", port))
	}
	seen := map[half]bool{}
	confused := func() string {
		t.Helper()
		with, err := confusion([]*lab.Node{s.node, other}, proxier.TCP, there, seen)
		if err != nil {
			t.Fatal(err)
		}
		return with
	}
	hideBehind(port + 1)
	if _, err := shell.Ask(t.Context(), "tcp", there); err != nil || confused() != "" {
		t.Errorf("behind another port: %v; confused with %q", err, confused())
	}
	hideBehind(port)
	if _, err := shell.Ask(t.Context(), "tcp", there); !timedOut(err) {
		t.Errorf("the kernel tells the connections apart: %v\n%s", err, s.run("ipvsadm", "-Lnc"))
	}
	if with := confused(); !strings.Contains(with, fmt.Sprintf(" %04X ", port)) {
		t.Errorf("confused with %q\n%s", with, s.run("ipvsadm", "-Lnc"))
	}
	if with := confused(); with != "" {
		t.Errorf("confused with %q again", with)
	}
	// No answer, for another reason.
	hideBehind(port + 2)
	s.run("iptables", "-I", "FORWARD", "-p", "tcp", "--sport", "8080", "-j", "DROP")
	if _, err := shell.Ask(t.Context(), "tcp", there); !timedOut(err) || confused() != "" {
		t.Errorf("replies are dropped: %v; confused with %q", err, confused())
	}
}

func timedOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
}

func TestParseConnections(t *testing.T) {
	text := "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData\n" +
		"TCP AC120002 9FF2 AC120001 7580 0AF40101 1F90 CLOSE             7\n" +
		"UDP fd00:0000:0000:0000:0000:0000:0000:0002 9FF2 fd00:0000:0000:0000:0000:0000:0000:0001 0035 fd00:0000:0000:0000:0000:0000:0000:0003 0035 UDP             300\n"
	all, err := parseConnections([]byte(text))
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	for i, want := range []string{"TCP 172.18.0.2:40946 172.18.0.1:30080 10.244.1.1:8080", "UDP [fd00::2]:40946 [fd00::1]:53 [fd00::3]:53"} {
		if c := all[i]; fmt.Sprint(c.protocol, " ", c.client, " ", c.virtual, " ", c.endpoint) != want {
			t.Errorf("%+v, want %s", c, want)
		}
	}
}
