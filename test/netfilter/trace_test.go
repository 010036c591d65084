// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/proxier"
)

// local4 and local6 are the addresses of the host in these tests.
var (
	local4 = netip.MustParseAddr("172.18.0.1")
	local6 = netip.MustParseAddr("fd00:18::1")
)

// incoming returns a packet that enters through eth0 and is forwarded to eth1.
func incoming(f proxier.Family, change func(*Packet)) Packet {
	p := Packet{
		Src: netip.MustParseAddrPort("10.0.0.1:40000"), Dst: netip.MustParseAddrPort("10.0.0.2:80"),
		Protocol: proxier.TCP, In: "eth0", Out: "eth1",
		Local: func(a netip.Addr) bool { return a == local4 || a == local6 },
	}
	if f == proxier.IPv6 {
		p.Src, p.Dst = netip.MustParseAddrPort("[fd00::1]:40000"), netip.MustParseAddrPort("[fd00::2]:80")
	}
	if change != nil {
		change(&p)
	}
	return p
}

func dst(to string) func(*Packet) {
	return func(p *Packet) { p.Dst = netip.MustParseAddrPort(to) }
}

func src(from string) func(*Packet) {
	return func(p *Packet) { p.Src = netip.AddrPortFrom(netip.MustParseAddr(from), 40000) }
}

func sends(p proxier.Protocol, kind uint8) func(*Packet) {
	return func(q *Packet) { q.Protocol, q.ICMPType = p, kind }
}

func marked(m uint32) func(*Packet) { return func(p *Packet) { p.Mark = m } }

func inState(s State) func(*Packet) { return func(p *Packet) { p.State = s } }

func by(in, out string) func(*Packet) { return func(p *Packet) { p.In, p.Out = in, out } }

// TestMatches: a rule with the match drops these packets, and not the others. The packets
// are forwarded ones with one change.
func TestMatches(t *testing.T) {
	type packets []func(*Packet)
	same := func(*Packet) {}
	for _, test := range []struct {
		match    string
		family   proxier.Family
		yes, not packets
	}{
		{match: "", yes: packets{same}},
		{match: "-s 10.0.0.1", yes: packets{same}, not: packets{src("10.0.0.2")}},
		{match: "-s 10.0.0.0/31", yes: packets{same, src("10.0.0.0")}, not: packets{src("10.0.0.2")}},
		{match: "! -s 10.0.0.0/31", not: packets{same}, yes: packets{src("10.0.0.2"), src("0.0.0.0")}},
		{match: "-d 10.0.0.2/32", yes: packets{same}, not: packets{dst("10.0.0.1:80"), dst("11.0.0.2:80")}},
		{match: "-d 0.0.0.2/0.0.0.127", yes: packets{same, dst("1.2.3.130:1")}, not: packets{dst("10.0.0.3:80")}},
		{match: "! -d 0.0.0.2/0.0.0.127", not: packets{same, dst("1.2.3.130:1")}, yes: packets{dst("10.0.0.3:80")}},
		{match: "-d 0.0.0.0/0", yes: packets{same}},
		{match: "-s fd00::1", family: proxier.IPv6, yes: packets{same}, not: packets{src("fd00::2"), src("fd01::1")}},
		{match: "-s fd00::/64", family: proxier.IPv6, yes: packets{same}, not: packets{src("fd00:0:0:1::1")}},
		{match: "-s fd00::/63", family: proxier.IPv6, yes: packets{same, src("fd00:0:0:1::1")}, not: packets{src("fd00:0:0:2::1")}},
		{match: "-d ::2/::7f", family: proxier.IPv6, yes: packets{same, dst("[fd99::82]:1")}, not: packets{dst("[fd00::3]:80")}},
		{match: "-p tcp", yes: packets{same}, not: packets{sends(proxier.UDP, 0)}},
		{match: "! -p tcp", not: packets{same}, yes: packets{sends(proxier.UDP, 0)}},
		{match: "-p sctp", yes: packets{sends(proxier.SCTP, 0)}, not: packets{same}},
		{match: "-i eth0", yes: packets{same}, not: packets{by("eth01", ""), by("eth", "")}},
		{match: "! -i eth0", not: packets{same}, yes: packets{by("eth1", "")}},
		{match: "-i eth+", yes: packets{same, by("eth", "")}, not: packets{by("veth0", "")}},
		{match: "! -i eth+", not: packets{same}, yes: packets{by("veth0", "")}},
		{match: "-o eth1", yes: packets{same}, not: packets{by("eth0", "eth0"), by("eth0", "")}},
		{match: "! -o eth1", not: packets{same}, yes: packets{by("eth0", "eth0"), by("eth0", "")}},
		{match: "-m comment --comment x", yes: packets{same}},
		{match: "-p tcp -m tcp", yes: packets{same}, not: packets{sends(proxier.UDP, 0)}},
		{match: "-p tcp --dport 80", yes: packets{same}, not: packets{dst("10.0.0.2:81"), sends(proxier.UDP, 0)}},
		{match: "-p udp --dport 79:80", yes: packets{sends(proxier.UDP, 0)}, not: packets{same}},
		{match: "-p tcp --dport 80:82", yes: packets{same, dst("10.0.0.2:82")}, not: packets{dst("10.0.0.2:79"), dst("10.0.0.2:83")}},
		{match: "-p tcp ! --dport 80:82", not: packets{same, dst("10.0.0.2:82")}, yes: packets{dst("10.0.0.2:79"), dst("10.0.0.2:83")}},
		{match: "-p sctp -m sctp --dport :80", yes: packets{sends(proxier.SCTP, 0)}, not: packets{same}},
		{match: "-p icmp --icmp-type 8", yes: packets{sends(ICMP, 8)}, not: packets{sends(ICMP, 0), sends(proxier.TCP, 8)}},
		{match: "-p icmp ! --icmp-type echo-request", not: packets{sends(ICMP, 8)}, yes: packets{sends(ICMP, 0)}},
		{match: "-p icmp --icmp-type 8/0", yes: packets{sends(ICMP, 8)}, not: packets{sends(ICMP, 0)}},
		{match: "-p icmp --icmp-type 8/1", not: packets{sends(ICMP, 8)}},
		{match: "-p icmpv6 --icmpv6-type echo-request", family: proxier.IPv6, yes: packets{sends(ICMPv6, 128)}, not: packets{sends(ICMPv6, 129), sends(ICMP, 128)}},
		{match: "-m mark --mark 0x4000/0x4000", yes: packets{marked(0x4000), marked(0xffff)}, not: packets{same, marked(0x8000)}},
		{match: "-m mark ! --mark 0x4000/0x4000", not: packets{marked(0x4000), marked(0xffff)}, yes: packets{same, marked(0x8000)}},
		{match: "-m mark --mark 1", yes: packets{marked(1)}, not: packets{same, marked(3)}},
		{match: "-m conntrack --ctstate NEW", yes: packets{same}, not: packets{inState(StateInvalid), inState(StateEstablished), inState(StateRelated)}},
		{match: "-m conntrack --ctstate RELATED,ESTABLISHED", not: packets{same, inState(StateInvalid)}, yes: packets{inState(StateEstablished), inState(StateRelated)}},
		{match: "-m conntrack --ctstate INVALID", yes: packets{inState(StateInvalid)}, not: packets{same}},
		{match: "-m conntrack ! --ctstate NEW,INVALID", not: packets{same, inState(StateInvalid)}, yes: packets{inState(StateRelated)}},
		{match: "-m conntrack --ctstate DNAT", yes: packets{dst("10.0.0.9:80")}, not: packets{same}},
		{match: "-m conntrack --ctstate UNTRACKED,SNAT", not: packets{same, dst("10.0.0.9:80")}},
		{match: "-m addrtype --dst-type LOCAL", yes: packets{dst("172.18.0.1:80"), dst("127.0.0.9:80")}, not: packets{same, src("172.18.0.1")}},
		{match: "-m addrtype ! --dst-type LOCAL", not: packets{dst("172.18.0.1:80")}, yes: packets{same}},
		{match: "-m addrtype --src-type LOCAL", yes: packets{src("172.18.0.1")}, not: packets{same, dst("172.18.0.1:80")}},
		{match: "-m addrtype ! --src-type LOCAL --dst-type LOCAL", yes: packets{dst("172.18.0.1:80")}, not: packets{same, func(p *Packet) {
			p.Dst = netip.AddrPortFrom(local4, 80)
			p.Src = p.Dst
		}}},
		{match: "-m addrtype --dst-type LOCAL", family: proxier.IPv6, yes: packets{dst("[fd00:18::1]:80"), dst("[::1]:80")}, not: packets{same}},
		{match: "-m statistic --mode random --probability 1", yes: packets{same}},
		{match: "-m statistic --mode random --probability 0", not: packets{same}},
		{match: "-m statistic --mode random ! --probability 0", yes: packets{same}},
		{match: "-m nfacct --nfacct-name test_pkts", yes: packets{same}},
		{match: "-m recent --rcheck --name x", not: packets{same}},
		{match: "-m recent ! --rcheck --name x", yes: packets{same}},
		{match: "-m recent --set --name x", yes: packets{same}},
		{match: "-m recent ! --set --name x", not: packets{same}},
		// All of them.
		{match: "-s 10.0.0.1 -p tcp --dport 80 -m mark --mark 1", yes: packets{marked(1)}, not: packets{same}},
	} {
		t.Run(test.match, func(t *testing.T) {
			// Packets to 10.0.0.9 are translated to the destination of the others.
			rules := "*filter\n:KUBE-A - [0:0]\n-A KUBE-A " + test.match + " -j DROP\n-A INPUT -j KUBE-A\n-A FORWARD -j KUBE-A\nCOMMIT\n"
			if test.family == proxier.IPv4 {
				rules += "*nat\n-A PREROUTING -d 10.0.0.9 -j DNAT --to-destination 10.0.0.2\nCOMMIT\n"
			}
			check := func(changes packets, want Verdict) {
				for i, change := range changes {
					if r := restored(t, test.family, rules).Trace(incoming(test.family, change)); r.Verdict != want {
						t.Errorf("packet %d that should be %sed: %s", i, want, r)
					}
				}
			}
			check(test.yes, Drop)
			check(test.not, Accept)
		})
	}
}

// TestCounters: a counter counts packets, cannot be deleted while a rule uses it, and does not
// affect other tables.
func TestCounters(t *testing.T) {
	const name = "test_pkts"
	v4, v6 := New(proxier.IPv4), New(proxier.IPv6)
	rules := []byte("*filter\n-A INPUT -p udp -m nfacct --nfacct-name " + name + "\nCOMMIT\n")
	if err := v4.Restore(rules); !errors.Is(err, nfacct.ErrNotSupported) {
		t.Errorf("without counters: %v", err)
	}
	counters := NewCounters(v4, v6)
	if err := v4.Restore(rules); !errors.Is(err, nfacct.ErrNotFound) {
		t.Errorf("without this one: %v", err)
	}
	for range 2 {
		if err := counters.Ensure(name); err != nil {
			t.Fatal(err)
		}
		for _, tables := range []*Tables{v4, v6} {
			if err := tables.Restore(rules); err != nil {
				t.Fatal(err)
			}
		}
	}
	v4.Trace(incoming(proxier.IPv4, func(p *Packet) { p.Dst = netip.AddrPortFrom(local4, 80) }))
	v6.Trace(incoming(proxier.IPv6, func(p *Packet) { p.Dst, p.Protocol = netip.AddrPortFrom(local6, 80), proxier.UDP }))
	if n, err := counters.Packets(name); err != nil || n != 2 {
		t.Errorf("it has counted %d packets (%v), want one by each rule", n, err)
	}
	for _, tables := range []*Tables{v4, v6} {
		if err := counters.Delete(name); !errors.Is(err, nfacct.ErrInUse) {
			t.Errorf("deleted while a rule uses it: %v", err)
		}
		if err := tables.Restore([]byte("*filter\n-D INPUT 1\n-D INPUT 1\nCOMMIT\n")); err != nil {
			t.Fatal(err)
		}
	}
	if err := counters.Delete(name); err != nil {
		t.Error(err)
	}
	if _, err := counters.Packets(name); !errors.Is(err, nfacct.ErrNotFound) {
		t.Errorf("after it was deleted: %v", err)
	}
}

// TestTargets: the effects of targets. Results are compared without their steps.
func TestTargets(t *testing.T) {
	sent := func(p *Packet) { p.In = "" }
	to := netip.MustParseAddrPort
	for _, test := range []struct {
		name, rules string
		family      proxier.Family
		change      func(*Packet)
		want        Result
	}{
		{name: "nothing", want: Result{To: to("10.0.0.2:80")}},
		{name: "ACCEPT ends a chain", rules: "*filter\n-A FORWARD -j ACCEPT\n-A FORWARD -j DROP\nCOMMIT\n", want: Result{To: to("10.0.0.2:80")}},
		{name: "ACCEPT ends only its own hook",
			rules: "*filter\n-A FORWARD -j ACCEPT\nCOMMIT\n*mangle\n-A POSTROUTING -j DROP\nCOMMIT\n", want: Result{Verdict: Drop, To: to("10.0.0.2:80")}},
		{name: "DROP", rules: "*filter\n-A FORWARD -j DROP\nCOMMIT\n", want: Result{Verdict: Drop, To: to("10.0.0.2:80")}},
		{name: "RETURN goes on behind the jump",
			rules: "*filter\n:KUBE-A - [0:0]\n-A FORWARD -j KUBE-A\n-A FORWARD -j REJECT\n-A KUBE-A -j RETURN\n-A KUBE-A -j DROP\nCOMMIT\n",
			want:  Result{Verdict: Reject, Kind: "icmp-port-unreachable", To: to("10.0.0.2:80")}},
		{name: "the end of a chain is a return",
			rules: "*filter\n:KUBE-A - [0:0]\n-A FORWARD -j KUBE-A\n-A FORWARD -j DROP\nCOMMIT\n", want: Result{Verdict: Drop, To: to("10.0.0.2:80")}},
		{name: "RETURN of a built-in chain is its policy",
			rules: "*filter\n:FORWARD DROP [0:0]\n-A FORWARD -j RETURN\n-A FORWARD -j ACCEPT\nCOMMIT\n", want: Result{Verdict: Drop, To: to("10.0.0.2:80")}},
		{name: "a rule without a target", rules: "*filter\n-A FORWARD -p tcp\nCOMMIT\n", want: Result{To: to("10.0.0.2:80")}},
		{name: "policy", rules: "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n", want: Result{Verdict: Drop, To: to("10.0.0.2:80")}},
		{name: "REJECT with a kind", rules: "*filter\n-A FORWARD -p tcp -j REJECT --reject-with tcp-reset\nCOMMIT\n",
			want: Result{Verdict: Reject, Kind: "tcp-reset", To: to("10.0.0.2:80")}},
		{name: "REJECT of IPv6", family: proxier.IPv6, rules: "*filter\n-A FORWARD -j REJECT\nCOMMIT\n",
			want: Result{Verdict: Reject, Kind: "icmp6-port-unreachable", To: to("[fd00::2]:80")}},
		{name: "MARK", rules: "*mangle\n-A FORWARD -j MARK --set-xmark 0x2/0x6\nCOMMIT\n", change: marked(0xd), want: Result{To: to("10.0.0.2:80"), Mark: 0xb}},
		{name: "MARK or", rules: "*nat\n-A PREROUTING -j MARK --or-mark 0x6\nCOMMIT\n", change: marked(3), want: Result{To: to("10.0.0.2:80"), Mark: 7}},
		{name: "MARK xor", rules: "*nat\n-A PREROUTING -j MARK --xor-mark 0x6\nCOMMIT\n", change: marked(3), want: Result{To: to("10.0.0.2:80"), Mark: 5}},
		{name: "MASQUERADE by a mark", rules: "*nat\n-A PREROUTING -j MARK --or-mark 1\n-A POSTROUTING -m mark --mark 1 -j MASQUERADE\nCOMMIT\n",
			want: Result{To: to("10.0.0.2:80"), Mark: 1, Masqueraded: true}},
		{name: "DNAT", rules: "*nat\n-A PREROUTING -p tcp -j DNAT --to-destination 10.9.9.9:99\n-A PREROUTING -p tcp -j DNAT --to-destination 10.8.8.8\nCOMMIT\n",
			want: Result{To: to("10.9.9.9:99")}},
		{name: "DNAT that keeps the port", rules: "*nat\n-A PREROUTING -j DNAT --to-destination 10.9.9.9\nCOMMIT\n", want: Result{To: to("10.9.9.9:80")}},
		{name: "DNAT of IPv6", family: proxier.IPv6, rules: "*nat\n-A PREROUTING -p tcp -j DNAT --to-destination [fd00::9]:99\nCOMMIT\n", want: Result{To: to("[fd00::9]:99")}},
		{name: "later rules see the new destination",
			rules: "*nat\n-A PREROUTING -p tcp -j DNAT --to-destination 10.9.9.9:99\nCOMMIT\n*filter\n-A FORWARD -d 10.9.9.9 -p tcp --dport 99 -j DROP\nCOMMIT\n",
			want:  Result{Verdict: Drop, To: to("10.9.9.9:99")}},
		{name: "DNAT to where it was going is none",
			rules: "*nat\n-A PREROUTING -j DNAT --to-destination 10.0.0.2\nCOMMIT\n*filter\n-A FORWARD -m conntrack --ctstate DNAT -j DROP\nCOMMIT\n",
			want:  Result{To: to("10.0.0.2:80")}},
		{name: "DNAT to this host is input",
			rules: "*nat\n-A PREROUTING -j DNAT --to-destination 172.18.0.1\nCOMMIT\n*filter\n:FORWARD DROP [0:0]\n-A INPUT -m addrtype --dst-type LOCAL -j REJECT\nCOMMIT\n",
			want:  Result{Verdict: Reject, Kind: "icmp-port-unreachable", To: to("172.18.0.1:80")}},
		{name: "REDIRECT goes to the device's address", change: func(p *Packet) { p.Own = local4 },
			rules: "*nat\n-A PREROUTING -p tcp -j REDIRECT --to-ports 99\nCOMMIT\n*filter\n:FORWARD DROP [0:0]\nCOMMIT\n", want: Result{To: to("172.18.0.1:99")}},
		{name: "REDIRECT of an unknown device", rules: "*nat\n-A PREROUTING -j REDIRECT\nCOMMIT\n*filter\n:FORWARD DROP [0:0]\nCOMMIT\n", want: Result{To: to("10.0.0.2:80")}},
		{name: "REDIRECT of what the host sends", change: sent, rules: "*nat\n-A OUTPUT -j REDIRECT\nCOMMIT\n", want: Result{To: to("127.0.0.1:80")}},
		{name: "REDIRECT of what the host sends, IPv6", family: proxier.IPv6, change: sent, rules: "*nat\n-A OUTPUT -j REDIRECT\nCOMMIT\n", want: Result{To: to("[::1]:80")}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := restored(t, test.family, test.rules).Trace(incoming(test.family, test.change))
			text := got.String()
			got.Steps = nil
			if diff := cmp.Diff(test.want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
				t.Errorf("result (-want +got):\n%s%s", diff, text)
			}
		})
	}
}

// everywhere has a rule in every built-in chain, which shows the path of a packet.
const everywhere = `*mangle
-A PREROUTING
-A INPUT
-A FORWARD
-A OUTPUT
-A POSTROUTING
COMMIT
*nat
-A PREROUTING -d 10.0.0.9 -j DNAT --to-destination 10.0.0.2
-A PREROUTING
-A INPUT
-A OUTPUT -d 10.0.0.9 -j DNAT --to-destination 172.18.0.1
-A OUTPUT
-A POSTROUTING
COMMIT
*filter
-A INPUT
-A FORWARD
-A OUTPUT
COMMIT
`

// TestRoute: packets traverse the same hooks as in the kernel, with the same devices.
func TestRoute(t *testing.T) {
	const forwarded = "mangle PREROUTING, nat PREROUTING, mangle FORWARD, filter FORWARD, mangle POSTROUTING, nat POSTROUTING"
	for _, test := range []struct {
		name   string
		change func(*Packet)
		want   string
	}{
		{"forwarded", nil, forwarded},
		{"to this host", dst("172.18.0.1:80"), "mangle PREROUTING, nat PREROUTING, mangle INPUT, filter INPUT, nat INPUT"},
		{"to loopback", dst("127.0.0.1:80"), "mangle PREROUTING, nat PREROUTING, mangle INPUT, filter INPUT, nat INPUT"},
		{"sent", by("", "eth1"), "mangle OUTPUT, nat OUTPUT, filter OUTPUT, mangle POSTROUTING, nat POSTROUTING"},
		{"sent to itself", func(p *Packet) { p.In, p.Dst = "", netip.AddrPortFrom(local4, 80) },
			"mangle OUTPUT, nat OUTPUT, filter OUTPUT, mangle POSTROUTING, nat POSTROUTING, mangle PREROUTING, mangle INPUT, filter INPUT"},
		{"sent and translated to itself", func(p *Packet) { p.In, p.Dst = "", netip.MustParseAddrPort("10.0.0.9:80") },
			"mangle OUTPUT, nat OUTPUT, filter OUTPUT, mangle POSTROUTING, nat POSTROUTING, mangle PREROUTING, mangle INPUT, filter INPUT"},
		{"related", inState(StateRelated), forwarded},
		{"related error", func(p *Packet) { p.State, p.Protocol = StateRelated, ICMP }, strings.ReplaceAll(strings.ReplaceAll(forwarded, "nat PREROUTING, ", ""), ", nat POSTROUTING", "")},
		{"established", inState(StateEstablished), "mangle PREROUTING, mangle FORWARD, filter FORWARD, mangle POSTROUTING"},
		{"invalid", inState(StateInvalid), "mangle PREROUTING, mangle FORWARD, filter FORWARD, mangle POSTROUTING"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := restored(t, proxier.IPv4, everywhere).Trace(incoming(proxier.IPv4, test.change))
			var way []string
			for _, s := range r.Steps {
				f := strings.Fields(s)
				way = append(way, f[0]+" "+f[1])
			}
			if diff := cmp.Diff(test.want, strings.Join(way, ", ")); diff != "" {
				t.Errorf("way (-want +got):\n%s", diff)
			}
		})
	}
}

// TestLoopback: packets of the host to itself leave and enter through lo. In OUTPUT, the
// device is that of the destination before its translation.
func TestLoopback(t *testing.T) {
	output := "*filter\n-A OUTPUT -o lo -j ACCEPT\n:OUTPUT DROP [0:0]\n"
	later := "*filter\n-A INPUT -i lo -j ACCEPT\n:INPUT DROP [0:0]\nCOMMIT\n*mangle\n-A POSTROUTING -o lo -j ACCEPT\n:POSTROUTING DROP [0:0]\n"
	for _, test := range []struct {
		to, rules string
		want      Verdict
	}{
		{"172.18.0.1:80", output, Accept}, {"10.0.0.9:80", output, Drop}, {"10.0.0.2:80", output, Drop},
		{"172.18.0.1:80", later, Accept}, {"10.0.0.9:80", later, Accept}, {"10.0.0.2:80", later, Drop},
	} {
		r := restored(t, proxier.IPv4, everywhere+test.rules+"COMMIT\n").Trace(incoming(proxier.IPv4, func(p *Packet) {
			p.In, p.Dst = "", netip.MustParseAddrPort(test.to)
		}))
		if r.Verdict != test.want {
			t.Errorf("to %s with %s: %s", test.to, test.rules, r)
		}
	}
}

// TestSteps: the steps are the rules that a packet matched.
func TestSteps(t *testing.T) {
	r := restored(t, proxier.IPv4, "*nat\n:KUBE-A - [0:0]\n-A PREROUTING -p udp -j KUBE-A\n-A PREROUTING -j KUBE-A\n"+
		"-A KUBE-A -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.3:81\nCOMMIT\n*filter\n:FORWARD DROP [0:0]\nCOMMIT\n").Trace(incoming(proxier.IPv4, nil))
	want := `drop to 10.0.0.3:81
	nat PREROUTING -j KUBE-A
	nat KUBE-A -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.3:81
	filter policy of FORWARD: DROP`
	if diff := cmp.Diff(want, r.String()); diff != "" {
		t.Errorf("result (-want +got):\n%s", diff)
	}
}

// TestBranches: both branches of random matches are followed.
func TestBranches(t *testing.T) {
	to := netip.MustParseAddrPort
	tables := restored(t, proxier.IPv4, `*nat
:KUBE-A - [0:0]
-A PREROUTING -m statistic --mode random --probability 0.25 -j KUBE-A
-A PREROUTING -m statistic --mode random --probability 0 -j DNAT --to-destination 10.0.0.9
-A PREROUTING -m statistic --mode random ! --probability 0.5 -j DNAT --to-destination 10.0.0.3
-A KUBE-A -m statistic --mode random --probability 0.5 -j DNAT --to-destination 10.0.0.4
-A KUBE-A -j DNAT --to-destination 10.0.0.5
COMMIT
*filter
-A FORWARD -d 10.0.0.4 -j DROP
COMMIT
`)
	packet := incoming(proxier.IPv4, nil)
	want := map[netip.AddrPort]float64{to("10.0.0.2:80"): 0.375, to("10.0.0.3:80"): 0.375, to("10.0.0.5:80"): 0.125}
	if diff := cmp.Diff(want, tables.Targets(packet)); diff != "" {
		t.Errorf("targets (-want +got):\n%s", diff)
	}
	sum := 0.0
	for _, b := range tables.Branches(packet) {
		sum += b.Probability
	}
	if sum != 1 {
		t.Errorf("the branches' probabilities add up to %v", sum)
	}
	// Random is used only for random matches: the first and the third rule.
	dice := []float64{0.25, 0.49}
	tables.Random = func() float64 {
		d := dice[0]
		dice = dice[1:]
		return d
	}
	if r := tables.Trace(packet); len(dice) != 0 || r.To != to("10.0.0.3:80") {
		t.Errorf("%d dice left, %s", len(dice), r)
	}
}

// TestRecent: lists record masked addresses, evict the least recently seen one, and are deleted
// with the last rule that uses them.
func TestRecent(t *testing.T) {
	now := time.Unix(1e9, 0)
	const check = "-A FORWARD -m recent --rcheck --seconds 10 --reap --name x --mask 255.255.255.254 -j DROP\n"
	tables := restored(t, proxier.IPv4, "*filter\n"+check+"COMMIT\n*mangle\n-A POSTROUTING -m recent --set --name x --mask 255.255.255.254\nCOMMIT\n")
	tables.Now = func() time.Time { return now }
	pass := func(from string, want Verdict) {
		t.Helper()
		if r := tables.Trace(incoming(proxier.IPv4, src(from))); r.Verdict != want {
			t.Errorf("from %s: %s", from, r)
		}
	}
	pass("10.0.0.2", Accept)
	pass("10.0.0.2", Drop)
	pass("10.0.0.3", Drop) // the same under the mask
	pass("10.0.0.4", Accept)
	now = now.Add(10 * time.Second)
	pass("10.0.0.2", Drop)
	now = now.Add(time.Nanosecond)
	pass("10.0.0.2", Accept)
	pass("10.0.0.2", Drop)

	for i := range listLength {
		pass(fmt.Sprintf("10.0.1.%d", 2*i), Accept)
	}
	pass("10.0.0.2", Accept) // was evicted
	pass("10.0.1.198", Drop)

	for _, change := range []string{"*filter\n-F FORWARD\n" + check + "COMMIT\n", "*mangle\n-F POSTROUTING\nCOMMIT\n"} {
		if err := tables.Restore([]byte(change)); err != nil {
			t.Fatal(err)
		}
		pass("10.0.1.198", Drop)
	}
	for _, change := range []string{"*filter\n-F FORWARD\nCOMMIT\n", "*filter\n" + check + "COMMIT\n"} {
		if err := tables.Restore([]byte(change)); err != nil {
			t.Fatal(err)
		}
	}
	pass("10.0.1.198", Accept)
}

// TestRehearsal: computing the branches of a packet does not change lists.
func TestRehearsal(t *testing.T) {
	tables := restored(t, proxier.IPv4, "*filter\n-A FORWARD -m recent --rcheck --name x -j DROP\n-A FORWARD -m recent --set --name x\nCOMMIT\n")
	packet := incoming(proxier.IPv4, nil)
	want := map[netip.AddrPort]float64{packet.Dst: 1}
	for range 2 {
		if diff := cmp.Diff(want, tables.Targets(packet)); diff != "" {
			t.Errorf("targets (-want +got):\n%s", diff)
		}
	}
	tables.Trace(packet)
	if diff := cmp.Diff(map[netip.AddrPort]float64{}, tables.Targets(packet)); diff != "" {
		t.Errorf("targets of a known address (-want +got):\n%s", diff)
	}
}

// many returns rules for many Services with two endpoints each, in one long chain.
func many(n int) []byte {
	var chains, rules strings.Builder
	for i := range n {
		vip := fmt.Sprintf("10.96.%d.%d", i/256, i%256)
		fmt.Fprintf(&chains, ":KUBE-SVC-%d - [0:0]\n:KUBE-SEP-%d-0 - [0:0]\n:KUBE-SEP-%d-1 - [0:0]\n", i, i, i)
		fmt.Fprintf(&rules, "-A KUBE-SERVICES -m comment --comment \"shop/web%d:p cluster IP\" -m tcp -p tcp -d %s --dport 80 -j KUBE-SVC-%d\n", i, vip, i)
		fmt.Fprintf(&rules, "-A KUBE-SVC-%d -m comment --comment \"shop/web%d:p cluster IP\" -m tcp -p tcp -d %s --dport 80 ! -s 10.244.0.0/16 -j KUBE-MARK-MASQ\n", i, i, vip)
		fmt.Fprintf(&rules, "-A KUBE-SVC-%d -m statistic --mode random --probability 0.5 -j KUBE-SEP-%d-0\n-A KUBE-SVC-%d -j KUBE-SEP-%d-1\n", i, i, i, i)
		for e := range 2 {
			fmt.Fprintf(&rules, "-A KUBE-SEP-%d-%d -s 10.244.%d.%d -j KUBE-MARK-MASQ\n", i, e, i/256, i%256)
			fmt.Fprintf(&rules, "-A KUBE-SEP-%d-%d -m tcp -p tcp -j DNAT --to-destination 10.244.%d.%d:8080\n", i, e, i/256, i%256)
		}
	}
	return []byte("*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n" + chains.String() +
		"-A PREROUTING -j KUBE-SERVICES\n-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n" + rules.String() + "COMMIT\n")
}

func BenchmarkTrace(b *testing.B) {
	tables := New(proxier.IPv4)
	if err := tables.Restore(many(1000)); err != nil {
		b.Fatal(err)
	}
	packet := incoming(proxier.IPv4, dst("10.96.3.231:80")) // the last one
	b.ReportAllocs()
	for b.Loop() {
		if r := tables.Trace(packet); r.To.Port() != 8080 {
			b.Fatal(r)
		}
	}
}

func BenchmarkRestore(b *testing.B) {
	for _, n := range []int{1000, 10000} {
		all := many(n)
		b.Run(fmt.Sprintf("services=%d/all", n), func(b *testing.B) {
			for b.Loop() {
				if err := New(proxier.IPv4).Restore(all); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("services=%d/one", n), func(b *testing.B) {
			tables := New(proxier.IPv4)
			if err := tables.Restore(all); err != nil {
				b.Fatal(err)
			}
			one := []byte("*nat\n:KUBE-SVC-7 - [0:0]\n-A KUBE-SVC-7 -j KUBE-SEP-7-1\nCOMMIT\n")
			for b.Loop() {
				if err := tables.Restore(one); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
