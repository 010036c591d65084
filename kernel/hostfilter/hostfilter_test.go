// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hostfilter

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/nftables"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	m.Run()
}

// TestTables is about rules as iptables-save prints them.
func TestTables(t *testing.T) {
	const any = "IPv4"
	for _, test := range []struct {
		name   string
		chains []xtables.Chain
		want   []string
	}{
		{"nothing", nil, nil},
		{"empty", chains("PREROUTING ACCEPT"), nil},
		{"policy", chains("PREROUTING DROP"), []string{any}},
		{"NodePort", chains("PREROUTING ACCEPT", "-p tcp -m tcp --dport 30080 -j DROP"), []string{"IPv4 TCP ports 30080"}},
		{"NodePorts", chains("PREROUTING ACCEPT", "-p udp -m multiport --dports 30080,30100:30200 -j REJECT --reject-with icmp-port-unreachable"), []string{"IPv4 UDP ports 30080,30100-30200"}},
		{"inverted", chains("PREROUTING ACCEPT", "! -d 192.0.2.1/32 -p tcp -m tcp ! --dport 22 -j DROP"), []string{"IPv4 TCP"}},
		{"source", chains("PREROUTING ACCEPT", "-s 198.51.100.7/32 -j DROP"), []string{any}},
		{"Docker", chains("PREROUTING ACCEPT", "-d 172.17.0.2/32 ! -i docker0 -j DROP"), []string{"IPv4 to 172.17.0.2/32"}},
		{"no protocol of Services", chains("PREROUTING ACCEPT", "-p icmp -j DROP", "-p 47 -j DROP"), nil},
		{"no packet that begins a connection", chains("PREROUTING ACCEPT",
			"-m conntrack --ctstate INVALID -j DROP", "-p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN -m conntrack --ctstate NEW -j DROP",
			"-p tcp -m tcp --tcp-flags FIN,SYN FIN,SYN -j DROP", "-p tcp -m tcp --tcp-flags ALL NONE -j DROP"), nil},
		{"SYN", chains("PREROUTING ACCEPT", "-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j DROP"), []string{"IPv4 TCP"}},
		{"reverse path", chains("PREROUTING ACCEPT", "-m rpfilter --validmark --invert -j DROP"), nil},
		{"comment", chains("PREROUTING ACCEPT", `-m comment --comment "do not -j DROP" -j MARK --set-xmark 0x1/0x1`), nil},
		{"chain without rules", chains("PREROUTING ACCEPT", "-j cali-PREROUTING"), nil},
		{"accepted before", chains("PREROUTING ACCEPT", "-j ACCEPT", "-j DROP"), nil},
		{"some accepted before", chains("PREROUTING ACCEPT", "-i lo -j ACCEPT", "-p tcp -j DROP"), []string{"IPv4 TCP"}},
		{"Calico without host endpoints", append(chains("PREROUTING ACCEPT", "-m comment --comment cali:6gwbT8clXdHdC1b1 -j cali-PREROUTING"),
			chain("cali-PREROUTING", "-m comment --comment cali:x -j MARK --set-xmark 0x0/0xf0000", "-i cali+ -j MARK --set-xmark 0x40000/0x40000",
				"-m comment --comment cali:y -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP", "-m mark --mark 0x0/0x40000 -j cali-from-host-endpoint",
				"-m mark --mark 0x10000/0x10000 -j ACCEPT"),
			chain("cali-from-host-endpoint")), nil},
		{"Calico with a host endpoint", append(chains("PREROUTING ACCEPT", "-j cali-PREROUTING"),
			chain("cali-PREROUTING", "-m mark --mark 0x0/0x40000 -j cali-from-host-endpoint"),
			chain("cali-from-host-endpoint", "-i eth0 -g cali-fh-eth0"),
			chain("cali-fh-eth0", "-p tcp -m multiport --dports 22,6443 -j ACCEPT", "-m mark --mark 0x0/0x10000 -j cali-pi-drop"),
			chain("cali-pi-drop", "-p tcp -m set --match-set cali40s:x src -m multiport --dports 30000:32767 -j DROP")), []string{"IPv4 TCP ports 30000-32767"}},
		{"returned before", append(chains("PREROUTING ACCEPT", "-p tcp -j guard"), chain("guard", "-j RETURN", "-j DROP")), nil},
		{"narrowed by the jump", append(chains("PREROUTING ACCEPT", "-p tcp -m tcp --dport 1:100 -j guard"), chain("guard", "-p tcp -m tcp --dport 80:200 -j DROP", "-p udp -j DROP")), []string{"IPv4 TCP ports 80-100"}},
		{"a loop", append(chains("PREROUTING ACCEPT", "-j a"), chain("a", "-j b"), chain("b", "-j a")), nil},
	} {
		var to found
		(&saved{&xtables.Table{Name: "raw", Chains: test.chains}, inet.IPv4, "legacy"}).beforeDNAT(&to)
		var got []string
		for _, r := range to.rules {
			got = append(got, r.Match.String())
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", test.name, diff)
		}
	}
}

// chains is a built-in chain.
func chains(name string, rules ...string) []xtables.Chain {
	c := chain(strings.Fields(name)[0], rules...)
	c.Policy = strings.Fields(name)[1]
	return []xtables.Chain{c}
}

func chain(name string, rules ...string) xtables.Chain {
	return xtables.Chain{Name: name, Policy: "-", Rules: rules}
}

// TestFirewalls is about chain FORWARD.
func TestFirewalls(t *testing.T) {
	firewalld := []xtables.Chain{
		chain("FWD_pre", "-i br0 -j ACCEPT"), chain("FWD_zones", "-i eth0 -g FWD_public"), chain("FWD_public", "-m conntrack --ctstate NEW -m mark --mark 0x1/0x1 -j ACCEPT"),
	}
	for _, test := range []struct {
		name    string
		chains  []xtables.Chain
		is      bool // a firewall, where kube-proxy's rules have an exception
		status  bool // also where they have none
		accepts string
	}{
		{"nothing", nil, false, false, ""},
		{"policy", chains("FORWARD DROP"), true, false, ""},
		{"policy, and kube-proxy's rules", append(chains("FORWARD DROP", "-j KUBE-FORWARD", "-m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL"), chain("KUBE-FORWARD", "-j ACCEPT"), chain("KUBE-PROXY-FIREWALL", "-m conntrack ! --ctstate DNAT -j DROP")), true, false, ""},
		{"policy ACCEPT", chains("FORWARD ACCEPT", "-i cali+ -j cali-FORWARD", "-p tcp -m tcp --dport 80 -j DROP"), false, false, ""},
		{"the last rule rejects", chains("FORWARD ACCEPT", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-j REJECT --reject-with icmp-host-prohibited"), true, false, ""},
		{"flannel", append(chains("FORWARD DROP", "-m comment --comment \"flanneld forward\" -j FLANNEL-FWD"), chain("FLANNEL-FWD", "-s 10.244.0.0/16 -j ACCEPT", "-d 10.244.0.0/16 -j ACCEPT")), true, false, "10.244.0.0/16"},
		{"some ports", chains("FORWARD DROP", "-d 10.244.0.0/16 -p tcp -m tcp --dport 80 -j ACCEPT"), true, false, ""},
		{"established connections of the plugin firewall", append(chains("FORWARD DROP", "-j CNI-FORWARD"), chain("CNI-FORWARD", "-d 10.244.0.5/32 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-s 10.244.0.5/32 -j ACCEPT")), true, false, ""},
		{"accepted at last", chains("FORWARD DROP", "-i docker0 -j DROP", "-j ACCEPT"), false, false, ""},
		{"ufw", append(chains("FORWARD DROP", "-j ufw-before-logging-forward", "-j ufw-before-forward", "-j ufw-reject-forward"), chain("ufw-before-forward", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-p icmp -m icmp --icmp-type 3 -j ACCEPT", "-j ufw-user-forward"), chain("ufw-user-forward"), chain("ufw-reject-forward")), true, false, ""},
		{"firewalld", append(chains("FORWARD ACCEPT", "-m conntrack --ctstate RELATED,ESTABLISHED,DNAT -j ACCEPT", "-i lo -j ACCEPT", "-j FWD_pre", "-j FWD_zones", "-m conntrack --ctstate INVALID -j DROP", "-j REJECT --reject-with icmp-host-prohibited"), firewalld...), true, true, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			table := &saved{&xtables.Table{Name: "filter", Chains: test.chains}, inet.IPv4, "legacy"}
			f, is := table.firewall()
			accepts := strings.Trim(fmt.Sprint(f.Accepts), "[]")
			if is != test.is || is && accepts != test.accepts || f.Not != [inet.Families]bool{inet.IPv6: true} && test.chains != nil {
				t.Errorf("is one: %v, %+v", is, f)
			}
			if c, within := table.base("FORWARD"); c != nil {
				if _, is := newWalk(table.rules, nil).firewall("FORWARD", within, c.Policy == "DROP", true, ""); is != test.status {
					t.Errorf("goes by the status of connections: %v", is)
				}
			}
		})
	}
}

// Chains that fan out are followed for a bounded time, and then count as dropping everything.
func TestBounds(t *testing.T) {
	to := found{}
	w := newWalk(func(string) ([]step, error) { return nil, nil }, &to)
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		for range 20 {
			w.chains[name] = append(w.chains[name], step{Rule: nftables.Rule{Verdict: nftables.Jump, Target: string(name[0] + 1)}, where: name})
		}
	}
	w.begin("a", inet.Match{}, false, "")
	if len(to.rules) != 1 || !to.rules[0].Match.IsAll() || !strings.Contains(to.rules[0].Where, "too many") {
		t.Errorf("found %v", to.rules)
	}
	for _, byStatus := range []bool{false, true} {
		w.steps = 0
		if _, drops := w.firewall("a", inet.Match{}, false, byStatus, ""); !drops {
			t.Errorf("by status %v: a firewall with too many rules counts as forwarding", byStatus)
		}
	}
}

// TestWatch has rules of both variants of iptables and of nf_tables come and go.
func TestWatch(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	w := Watcher{In: n.Do}
	run := func(command string) {
		t.Helper()
		if out, err := n.Command(t.Context(), "sh", "-c", command).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
	}
	look := func(want ...string) {
		t.Helper()
		list, err := w.Look(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, r := range list.BeforeDNAT {
			got = append(got, r.Match.String())
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	}
	look()
	run("iptables-nft -t raw -A PREROUTING -p tcp --dport 30001 -j DROP")
	look("IPv4 TCP ports 30001")
	run("ip6tables-nft -t mangle -A PREROUTING -p udp --dport 30002 -j DROP; iptables-nft -t nat -N KUBE-SERVICES; iptables-nft -A FORWARD -j DROP")
	look("IPv4 TCP ports 30001", "IPv6 UDP ports 30002")
	run("nft add table inet guard; nft add chain inet guard late '{ type filter hook prerouting priority 0; policy drop; }'")
	look("IPv4 TCP ports 30001", "IPv6 UDP ports 30002")
	run("nft add table netdev guard; nft add chain netdev guard in '{ type filter hook ingress device eth0 priority 0; }'; nft add rule netdev guard in tcp dport 30003 drop")
	look("IPv4 TCP ports 30001", "IPv6 UDP ports 30002", "TCP ports 30003")
	w.readAt = time.Time{}
	run("ip6tables-legacy -t raw -A PREROUTING -p tcp --dport 30004 -j DROP")
	look("IPv4 TCP ports 30001", "IPv6 TCP ports 30004", "IPv6 UDP ports 30002", "TCP ports 30003")
	firewalls := func(want ...string) {
		t.Helper()
		all, err := w.Look(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, f := range all.Firewalls {
			got = append(got, fmt.Sprint(f.Where, f.Accepts))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	}
	const forward = "chain FORWARD in table ip filter of nf_tables"
	firewalls(forward + "[]")
	run("iptables-nft -I FORWARD -d 10.244.0.0/16 -j ACCEPT")
	firewalls(forward + "[10.244.0.0/16]")
	run("nft add table inet firewalld; nft add chain inet firewalld filter_FORWARD '{ type filter hook forward priority 10; policy drop; }'")
	firewalls(forward + "[10.244.0.0/16]") // translated connections fare no better
	run("nft add rule inet firewalld filter_FORWARD ct status dnat accept")
	firewalls(forward+"[10.244.0.0/16]", "chain filter_FORWARD in table inet firewalld of nf_tables[]")
	run("iptables-nft -F FORWARD; nft delete table inet firewalld")
	firewalls(forward+"[10.244.0.0/16]", "chain filter_FORWARD in table inet firewalld of nf_tables[]")

	// A reload is no change.
	run("nft delete table netdev guard; iptables-nft -t raw -F")
	look("IPv4 TCP ports 30001", "IPv6 TCP ports 30004", "IPv6 UDP ports 30002", "TCP ports 30003")
	run("iptables-nft -t raw -A PREROUTING -p tcp --dport 30001 -j DROP")
	ended := func() {
		for text, l := range w.gone {
			l.since = l.since.Add(-keepTime)
			w.gone[text] = l
		}
	}
	ended()
	look("IPv4 TCP ports 30001", "IPv6 TCP ports 30004", "IPv6 UDP ports 30002")
	firewalls()

	// Where legacy tables cannot be read, rules of nf_tables still go.
	run("iptables-nft -t raw -F")
	w.read = func(ctx context.Context) (list [sources]Filters, errs [sources]error) {
		list, errs = readSources(ctx)
		list[1], errs[1] = Filters{}, errors.New("no tool")
		return list, errs
	}
	_, failed := w.Look(t.Context())
	ended()
	if list, _ := w.Look(t.Context()); failed == nil || len(list.BeforeDNAT) != 2 {
		t.Errorf("error %v, rules %v; want two rules", failed, list.BeforeDNAT)
	}
}

// TestUnread: what cannot be read counts if that lasts. Rules that were known count as well, until reading works again.
func TestUnread(t *testing.T) {
	rule := Rule{Match: inet.Match{Protocol: inet.TCP}, Where: "a rule"}
	var failed error
	w := Watcher{read: func(context.Context) (list [sources]Filters, errs [sources]error) {
		if failed == nil {
			list[0].BeforeDNAT = []Rule{rule}
		}
		return list, [sources]error{failed}
	}}
	look := func(what string, want ...string) {
		t.Helper()
		all, err := w.Look(t.Context())
		if (err == nil) != (failed == nil) {
			t.Errorf("%s: error %v, want %v", what, err, failed)
		}
		var got []string
		if all.Unread != "" {
			got = append(got, "unread: "+all.Unread)
		}
		for _, r := range all.BeforeDNAT {
			got = append(got, r.String())
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", what, diff)
		}
	}
	const all, known = "unread: broken", "a rule (TCP)"
	failed = errors.New("broken")
	look("at first")
	w.failing = w.failing.Add(-unreadTime)
	look("at first, for longer", all)
	failed, w.readAt = nil, w.readAt.Add(-rereadTime)
	look("once read", known)
	failed, w.generation = errors.New("broken"), w.generation+1
	look("for a moment", known)
	failed = nil
	look("tried again at once", known)
	failed, w.generation = errors.New("broken"), w.generation+1
	look("for a moment again", known)
	w.failing = w.failing.Add(-unreadTime)
	look("for longer", all, known)
	failed, w.readAt = errors.New("broken otherwise"), w.readAt.Add(-rereadTime)
	look("for another reason", all, known)
	failed, w.readAt = nil, w.readAt.Add(-rereadTime)
	look("read again", known)
	failed, w.generation = errors.New("broken otherwise"), w.generation+1
	look("for a moment, for another reason", known)
	w.failing = w.failing.Add(-unreadTime)
	look("for that reason", all+" otherwise", known)
	failed, w.readAt = nil, w.readAt.Add(-rereadTime)
	look("read once more", known)
	w.In = func(func() error) error { return failed }
	failed = errors.New("no namespace")
	look("no namespace for a moment", known)
	w.failing = w.failing.Add(-unreadTime)
	look("no namespace for longer", "unread: no namespace", known)
}

// TestAwait: a start waits for rules that cannot be read at first, but no longer than until that counts.
func TestAwait(t *testing.T) {
	for name, test := range map[string]struct{ failures, want time.Duration }{
		"read at once":      {0, 0},
		"read a moment on":  {3, 3 * pollTime},
		"not read for long": {math.MaxInt64, unreadTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				reads := time.Duration(0)
				w := Watcher{read: func(context.Context) (list [sources]Filters, errs [sources]error) {
					if reads++; reads <= test.failures {
						errs[0] = errors.New("broken")
					}
					return list, errs
				}}
				start := time.Now()
				all, err := w.Await(t.Context())
				if took := time.Since(start); took != test.want {
					t.Errorf("it took %v, want %v", took, test.want)
				}
				if lasts := test.failures > test.want/pollTime; (err != nil) != lasts || (all.Unread != "") != lasts {
					t.Errorf("unread %q, error %v", all.Unread, err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				w.In = func(func() error) error { return errors.New("broken") }
				w.failing = time.Time{}
				if all, err := w.Await(ctx); err == nil || all.Unread != "" || time.Since(start) != test.want {
					t.Errorf("after the end of the context: %+v, %v", all, err)
				}
			})
		})
	}
}
