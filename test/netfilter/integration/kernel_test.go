// SPDX-License-Identifier: Apache-2.0

//go:build linux

package integration

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/netfilter"
)

// counted is a rule that has seen packets, as iptables-save -c prints it.
var counted = regexp.MustCompile(`^\[([1-9]\d*):\d+\] -A (.*)$`)

// counts are the rules that packets to a port have matched, and how many packets.
func (r tools) counts(t *testing.T, port uint16) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for _, table := range tableNames {
		text, err := r.Command(t.Context(), r.name+"-save", "-c", "-t", table).Output()
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			line = strings.TrimSuffix(line, "\n")
			if m := counted.FindStringSubmatch(line); m != nil && strings.Contains(line, fmt.Sprintf("--dport %d", port)) {
				var n int
				if _, err := fmt.Sscan(m[1], &n); err != nil {
					t.Fatal(err)
				}
				counts[table+" "+m[2]] += n
			}
		}
	}
	return counts
}

// builtin are the chains of each table.
var builtin = map[string][]string{
	"nat":    {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
	"filter": {"INPUT", "FORWARD", "OUTPUT"},
	"mangle": {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
}

// everyChain has rules for a port in all built-in chains: one for any packet, and those
// for loopback where the device is known.
func everyChain(port uint16) string {
	var text strings.Builder
	for _, table := range tableNames {
		fmt.Fprintf(&text, "*%s\n", table)
		for _, chain := range builtin[table] {
			match := fmt.Sprintf("-A %s %%s-p udp -m udp --dport %d\n", chain, port)
			fmt.Fprintf(&text, match, "")
			if chain != "OUTPUT" && chain != "POSTROUTING" {
				fmt.Fprintf(&text, match, "-i lo ")
			}
			if chain != "INPUT" && chain != "PREROUTING" {
				fmt.Fprintf(&text, match, "-o lo ")
			}
		}
		text.WriteString("COMMIT\n")
	}
	return text.String()
}

// TestKernel: real packets match the same rules as in the trace, in every built-in chain,
// translated or not.
func TestKernel(t *testing.T) {
	vip := netip.MustParseAddr("10.96.0.9")
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			l := lab.NewT(t)
			n, client := l.Node("node1"), l.Client("client")
			shell, web := n.Pod("shell"), n.Pod("web")
			r, tables := newTools(t, proxier.IPv4, variant, n.Sandbox), netfilter.New(proxier.IPv4)
			// Without a translation in the table, connections are not tracked.
			if output, err := r.restore("*nat\n-A POSTROUTING -p sctp -j MASQUERADE\nCOMMIT\n"); err != nil {
				t.Fatalf("%v: %s", err, output)
			}
			for i, test := range []struct {
				name string
				from *lab.Sandbox
				to   netip.Addr
				nat  string // rules, with %s for the match
			}{
				{name: "forwarded from outside", from: client.Sandbox, to: web.Addr4},
				{name: "forwarded from a pod", from: shell.Sandbox, to: web.Addr4},
				{name: "from outside to the node", from: client.Sandbox, to: n.Addr4},
				{name: "from outside by the node to a pod", from: client.Sandbox, to: n.Addr4, nat: "-A PREROUTING %s -j DNAT --to-destination " + web.Addr4.String()},
				{name: "from a pod by a Service to the node", from: shell.Sandbox, to: vip, nat: "-A PREROUTING %s -j DNAT --to-destination " + n.Addr4.String()},
				{name: "from a pod, redirected", from: shell.Sandbox, to: vip, nat: "-A PREROUTING %s -j REDIRECT"},
				{name: "from a pod, masqueraded", from: shell.Sandbox, to: web.Addr4, nat: "-A POSTROUTING %s -j MASQUERADE"},
				{name: "sent to a pod", from: n.Sandbox, to: web.Addr4},
				{name: "sent to itself", from: n.Sandbox, to: n.Addr4},
				{name: "sent by a Service to a pod", from: n.Sandbox, to: vip, nat: "-A OUTPUT %s -j DNAT --to-destination " + web.Addr4.String()},
				{name: "sent by a Service to itself", from: n.Sandbox, to: vip, nat: "-A OUTPUT %s -j DNAT --to-destination " + n.Addr4.String()},
				{name: "sent by a Service to itself, masqueraded", from: n.Sandbox, to: vip,
					nat: "-A OUTPUT %[1]s -j DNAT --to-destination " + n.Addr4.String() + "\n-A POSTROUTING %[1]s -j MASQUERADE"},
				{name: "sent, redirected", from: n.Sandbox, to: vip, nat: "-A OUTPUT %s -j REDIRECT"},
				{name: "from a pod by a Service to the node, known as translated", from: shell.Sandbox, to: vip,
					nat: "-A PREROUTING %[1]s -j DNAT --to-destination " + n.Addr4.String() + "\n-A INPUT %[1]s -m conntrack --ctstate DNAT"},
				{name: "translated to where it was going, not known as translated", from: client.Sandbox, to: n.Addr4,
					nat: "-A PREROUTING %[1]s -j DNAT --to-destination " + n.Addr4.String() + "\n-A INPUT %[1]s -m conntrack --ctstate DNAT"},
				{name: "sent by itself to a pod", from: n.Sandbox, to: n.Addr4, nat: "-A OUTPUT %s -j DNAT --to-destination " + web.Addr4.String()},
			} {
				port := uint16(4000 + i)
				rules := everyChain(port)
				if test.nat != "" {
					rules += "*nat\n" + fmt.Sprintf(test.nat, fmt.Sprintf("-p udp -m udp --dport %d", port)) + "\nCOMMIT\n"
				}
				if output, err := r.restore(rules); err != nil {
					t.Fatalf("%v: %s", err, output)
				}
				if err := tables.Restore([]byte(rules)); err != nil {
					t.Fatal(err)
				}
				p := netfilter.Packet{
					Src: netip.AddrPortFrom(test.from.Addr4, 40000), Dst: netip.AddrPortFrom(test.to, port), Protocol: proxier.UDP,
					In: "eth0", Out: "eth0", Own: n.Addr4, Local: func(a netip.Addr) bool { return a == n.Addr4 },
				}
				if test.from == n.Sandbox {
					p.In = ""
				}
				want := map[string]int{}
				result := tables.Trace(p)
				for _, s := range result.Steps {
					want[s]++
				}
				if err := test.from.Do(func() error {
					c, err := net.Dial("udp4", p.Dst.String())
					if err != nil {
						return err
					}
					defer c.Close()
					_, err = c.Write([]byte("x"))
					return err
				}); err != nil {
					t.Fatal(err)
				}
				var diff string
				for deadline := time.Now().Add(5 * time.Second); ; {
					if diff = cmp.Diff(want, r.counts(t, port)); diff == "" || time.Now().After(deadline) {
						break
					}
				}
				if diff != "" {
					t.Errorf("%s: rules matched (-trace +kernel):\n%s%s", test.name, diff, result)
				}
			}
		})
	}
}
