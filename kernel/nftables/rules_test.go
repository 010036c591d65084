// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/test/lab"
)

// TestRules reads what nft and the nft variant of iptables wrote.
func TestRules(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	if _, err := exec.LookPath("nft"); err != nil {
		lab.SkipOrFail(t, err)
	}
	run := func(command string, args ...string) {
		t.Helper()
		if out, err := n.Command(t.Context(), command, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %s: %v: %s", command, strings.Join(args, " "), err, out)
		}
	}
	run("nft", "add table inet guard; add chain inet guard c; add chain inet guard d; "+
		"add set inet guard ports { type inet_service; flags interval; elements = { 80, 30000-30100, 65000-65535 }; }; "+
		"add map inet guard ways { type inet_service : verdict; elements = { 80 : drop, 81 : jump d, 82 : drop }; }")
	for _, test := range []struct{ rule, want string }{
		{"drop", "drop all packets exact"},
		{"tcp dport 30080 drop", "drop TCP ports 30080 exact"},
		{"tcp dport 30080-30090 counter drop", "drop TCP ports 30080-30090 exact"},
		{"udp dport { 53, 54 } reject", "drop UDP ports 53,54 exact"},
		{"tcp dport @ports drop", "drop TCP ports 80,30000-30100,65000-65535 exact"},
		{"tcp dport != 22 drop", "drop TCP"},
		{"ip daddr 192.0.2.1 tcp dport >= 1024 drop", "drop IPv4 TCP ports 1024-65535 to 192.0.2.1/32 exact"},
		{"ip daddr 192.0.2.0/25 drop", "drop IPv4 to 192.0.2.0/25 exact"},
		{"ip daddr 10.0.0.0/8 drop", "drop IPv4 to 10.0.0.0/8 exact"},
		{"ip6 daddr 2001:db8::/32 drop", "drop IPv6 to 2001:db8::/32 exact"},
		{"ip6 daddr 2001:db8::1 drop", "drop IPv6 to 2001:db8::1/128 exact"},
		{"ip saddr 192.0.2.1 drop", "drop IPv4"},
		{"meta nfproto ipv4 drop", "drop IPv4 exact"},
		{"iifname eth0 goto d", "goto d all packets"},
		{"jump d", "jump d all packets exact"},
		{"tcp dport vmap @ways", "drop TCP ports 80; jump d TCP ports 81; drop TCP ports 82"},
		{"tcp dport vmap { 80-90 : drop, 91 : accept }", "accept TCP; drop TCP"},
		{"ct state vmap { invalid : drop, established : accept }", ""},
		{"ct state invalid drop", ""},
		{"ct state established,related accept", ""},
		{"ct state new tcp dport 80 drop", "drop TCP ports 80"},
		{"ct state != new drop", "drop all packets"},
		{"ct status dnat accept", "accept all packets status"},
		{"tcp flags & (syn|fin) == (syn|fin) drop", ""},
		{"tcp flags & (fin|syn|rst|ack) == syn drop", "drop TCP"},
		{"fib saddr . iif oif missing drop", ""},
		{"limit rate over 10/second drop", "drop all packets"},
		{"ct state vmap { invalid : drop, new : jump d }", "jump d all packets"},
		{"accept", "accept all packets exact"},
		{"return", "return all packets exact"},
	} {
		run("nft", "flush chain inet guard c; add rule inet guard c "+test.rule)
		if diff := cmp.Diff(test.want, rulesOf(t, n, "inet", "guard", "c")); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", test.rule, diff)
		}
	}
	for _, test := range []struct{ rule, want string }{
		{"-p tcp --dport 30080 -j DROP", "drop IPv4 TCP ports 30080 exact"},
		{"-p udp --dport 30080:30090 -j DROP", "drop IPv4 UDP ports 30080-30090 exact"},
		{"-p tcp -m multiport --dports 80,30000:30010 -j DROP", "drop IPv4 TCP ports 80,30000-30010 exact"},
		{"-p tcp -m multiport ! --dports 80 -j DROP", "drop IPv4 TCP"},
		{"-d 192.0.2.0/24 -m comment --comment x -j DROP", "drop IPv4 to 192.0.2.0/24 exact"},
		{"-m conntrack --ctstate INVALID -j DROP", ""},
		{"-m conntrack --ctstate NEW -j DROP", "drop IPv4"},
		{"-m conntrack --ctstate RELATED,ESTABLISHED,DNAT -j ACCEPT", "accept IPv4 status"},
		{"-m conntrack ! --ctstate RELATED,ESTABLISHED -j DROP", "drop IPv4"},
		{"-p tcp --tcp-flags SYN,FIN SYN,FIN -j DROP", ""},
		{"-p tcp ! --syn -j DROP", ""},
		{"-p tcp --syn -j DROP", "drop IPv4 TCP"},
		{"-j NFQUEUE", "drop IPv4 exact"},
		{"-i eth0 -j MARK --set-mark 1", "continue IPv4"},
	} {
		run("iptables-nft", "-t", "mangle", "-F")
		run("iptables-nft", append([]string{"-t", "mangle", "-A", "PREROUTING"}, strings.Fields(test.rule)...)...)
		if diff := cmp.Diff(test.want, rulesOf(t, n, "ip", "mangle", "PREROUTING")); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", test.rule, diff)
		}
	}
}

func rulesOf(t *testing.T, n *lab.Node, family, table, chain string) string {
	t.Helper()
	var list []Rule
	if err := n.Do(func() (err error) { list, err = Rules(t.Context(), family, table, chain); return err }); err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, r := range list {
		text := [...]string{"continue", "accept", "drop", "return", "jump", "goto"}[r.Verdict]
		if r.Target != "" {
			text += " " + r.Target
		}
		text += " " + fmt.Sprint(r.Match)
		if r.Exact {
			text += " exact"
		}
		if r.Status {
			text += " status"
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, "; ")
}
