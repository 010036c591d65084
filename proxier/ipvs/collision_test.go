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

// IPVS identifies replies only by the endpoint and the client's address and port. So two
// connections collide if they have the same client and endpoint, but different virtual servers:
// if IPVS of any node on the path still has the first one, the second one gets no answer.
// Clients that take ports in turn avoid that. But a node that masquerades chooses random source
// ports, and may choose that of one of the node's own connections.

// half is the part of a connection that IPVS and conntrack have in common.
type half struct{ endpoint, client netip.AddrPort }

// collision returns the IPVS connection that collides with an unanswered one to an address; empty
// if there is none. It ignores connections in seen, and adds the returned one.
func collision(nodes []*lab.Node, protocol proxier.Protocol, to netip.AddrPort, seen map[half]bool) (with string, err error) {
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

// addUnanswered adds the conntrack entries of unanswered flows to an address (of all flows if the
// protocol is not TCP), each with the client before and after masquerading.
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

// Collision implements live.CollisionFinder.
func (s *scenarioTier) Collision(p scenarios.Probe) (with string, err error) {
	if s.collided == nil {
		s.collided = map[half]bool{}
	}
	return collision(s.nodes, p.Protocol, p.To, s.collided)
}

// TestKernelCollision: a client that another node masquerades with the source port of one of its own
// connections gets no answer, and collision finds the reason. It finds none for other clients.
func TestKernelCollision(t *testing.T) {
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
	collided := func() string {
		t.Helper()
		with, err := collision([]*lab.Node{s.node, other}, proxier.TCP, there, seen)
		if err != nil {
			t.Fatal(err)
		}
		return with
	}
	hideBehind(port + 1)
	if _, err := shell.Ask(t.Context(), "tcp", there); err != nil || collided() != "" {
		t.Errorf("another source port: %v; collided with %q", err, collided())
	}
	hideBehind(port)
	if _, err := shell.Ask(t.Context(), "tcp", there); !timedOut(err) {
		t.Errorf("the connections do not collide: %v\n%s", err, s.run("ipvsadm", "-Lnc"))
	}
	if with := collided(); !strings.Contains(with, fmt.Sprintf(" %04X ", port)) {
		t.Errorf("collided with %q\n%s", with, s.run("ipvsadm", "-Lnc"))
	}
	if with := collided(); with != "" {
		t.Errorf("collided with %q again", with)
	}
	// No answer, for another reason.
	hideBehind(port + 2)
	s.run("iptables", "-I", "FORWARD", "-p", "tcp", "--sport", "8080", "-j", "DROP")
	if _, err := shell.Ask(t.Context(), "tcp", there); !timedOut(err) || collided() != "" {
		t.Errorf("replies are dropped: %v; collided with %q", err, collided())
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
