// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-proxy/tandem/test/lab"
)

// Rules that filter packets before DNAT appear while clients connect: first about one NodePort, then
// about a source and so about all ports. They apply to what they are about from then on, as with
// upstream's rules: one client is shut out. Rules serve the others, no connection of them fails, and
// established ones continue; also while a firewall reloads. When the filters have gone, programs serve
// again.
func TestFiltersBeforeDNAT(t *testing.T) {
	s := newStage(t)
	shut := s.lab.Client("shut")
	ways := outside(s.node)
	for name, to := range targets() { // ClusterIPs that are routed to nodes
		if err := s.lab.Announce(netip.PrefixFrom(to.Addr(), to.Addr().BitLen()), s.node); err != nil {
			t.Fatal(err)
		}
		ways[name+" by ClusterIP"] = to
	}
	writeManifest(t, s.dir, "cidr.yaml", serviceCIDR)
	s.start("--ebpf-sync-period=1s", "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48")
	defer s.end()
	s.serves(t)
	w := lab.NewLoad(t)
	defer w.End()
	w.Use(s.client.Sandbox, targets(), gently)
	w.Use(s.far.Sandbox, ways, gently)
	long := s.open()

	nft := func(command string) {
		t.Helper()
		if out, err := s.node.Command(t.Context(), "nft", command).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
	}
	// reaches checks which targets the client that is shut out reaches.
	reaches := func(is func(name string) bool) {
		t.Helper()
		for name, to := range ways {
			s.await(t, fmt.Sprintf("%s, reached %v", name, is(name)), func() error {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second/4)
				defer cancel()
				r, err := shut.Ask(ctx, name[:3], to)
				if (err == nil) != is(name) {
					return fmt.Errorf("reply %v, error %w", r, err)
				}
				return nil
			})
		}
		w.More(100)
		checkAll(t, long)
	}
	carriers := func(want int) {
		t.Helper()
		_, body, err := s.node.Get(t.Context(), 10249, "/debug/carriers")
		if n := strings.Count(body, `"carrier":"iptables","reason":"it filters packets before DNAT: rule `); err != nil || n != want {
			t.Errorf("rules serve %d frontends because of filters, want %d: %s %v", n, want, body, err)
		}
	}
	reaches(func(string) bool { return true })
	isNodePort := func(name string) bool { return strings.HasPrefix(name, "tcp") && strings.HasSuffix(name, "node port") }
	guard := func(match string) string {
		return fmt.Sprintf("table inet guard { chain early { type filter hook prerouting priority -300; ip saddr %s %s drop; ip6 saddr %s %[2]s drop; }; }", shut.Addr4, match, shut.Addr6)
	}
	nft(guard("tcp dport 30080"))
	reaches(func(name string) bool { return !isNodePort(name) })
	carriers(2)
	nft("delete table inet guard; " + guard("counter"))
	reaches(func(string) bool { return false })
	carriers(12)
	if metrics, err := s.node.Fetch(t.Context(), 10249, "/metrics"); err != nil || !strings.Contains(metrics, "\ntandem_filters_before_dnat ") || strings.Contains(metrics, "\ntandem_filters_before_dnat 0") {
		t.Errorf("the metric does not count filters: %v", err)
	}
	if n := strings.Count(s.Log.String(), `reason="FiltersBeforeDNAT"`); n != 2 {
		t.Errorf("filters were reported %d times", n)
	}
	// A reload in two steps, with time to notice it between them.
	nft("delete table inet guard")
	w.More(2500) // takes longer than the interval in which filters are read
	carriers(12)
	nft(guard("counter"))
	reaches(func(string) bool { return false })
	if testing.Short() {
		w.End()
		few(t, w)
		return
	}
	nft("delete table inet guard")
	reaches(func(string) bool { return true })
	s.await(t, "programs to serve again", func() error { return holds(t, s.node, ":KUBE-SVC-", false) })
	reaches(func(string) bool { return true })
	w.End()
	few(t, w)
}

// TestConnectionsBeforeRules: without rules, conntrack sees no packets. Connections that began before the first rules, and are idle, go on:
// those of this host, whose source ports are not given to connections that rules masquerade; and those of pods,
// also where conntrack does not pick up established connections.
func TestConnectionsBeforeRules(t *testing.T) {
	t.Run("host", func(t *testing.T) {
		const rounds, masqueraded, atOnce = 150, 1500, 50
		s := newStage(t)
		s.start("--ebpf-sync-period=1s")
		defer s.end()
		conns := s.openBeforeRules(s.node.Sandbox, rounds)
		var g errgroup.Group
		g.SetLimit(atOnce)
		for name, to := range over("tcp", outside(s.node)) {
			if !strings.HasSuffix(name, "node port") {
				continue
			}
			for range masqueraded {
				g.Go(func() error {
					_, err := s.far.Ask(t.Context(), "tcp", to)
					return err
				})
			}
		}
		if err := g.Wait(); err != nil {
			t.Error(err)
		}
		checkAll(t, conns)
	})
	t.Run("pods, nf_conntrack_tcp_loose=0", func(t *testing.T) {
		s := newStage(t)
		if err := s.node.Do(func() error {
			return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_loose", []byte("0"), 0o644)
		}); err != nil {
			t.Fatal(err)
		}
		s.start("--ebpf-sync-period=1s")
		defer s.end()
		s.await(t, "both families' rule that keeps conntrack active", func() error {
			if n := strings.Count(rules(t, s.node), ":KUBE-PROXY-DRAIN "); n != 2 {
				return fmt.Errorf("%d chains KUBE-PROXY-DRAIN", n)
			}
			return nil
		})
		checkAll(t, s.openBeforeRules(s.client.Sandbox, 1))
	})
}

// openBeforeRules opens flows to the ClusterIPs in so many rounds, and then has rules serve the NodePort.
func (s *stage) openBeforeRules(from *lab.Sandbox, rounds int) []flow {
	s.t.Helper()
	s.serves(s.t)
	var list []flow
	for range rounds {
		list = append(list, openFlows(s.t, from, over("tcp", targets()))...)
	}
	const guard = "table inet guard { chain early { type filter hook prerouting priority -300; tcp dport 30080 ip saddr 192.0.2.99 drop; tcp dport 30080 ip6 saddr 2001:db8::99 drop; }; }"
	if out, err := s.node.Command(s.t.Context(), "nft", guard).CombinedOutput(); err != nil {
		s.t.Fatalf("%s: %v\n%s", guard, err, out)
	}
	s.await(s.t, "rules to serve the NodePort", func() error { return holds(s.t, s.node, "--dport 30080", true) })
	return list
}

// TestUnreadFilters: while the rules of this host cannot be read, rules serve clients outside, as a filter may be among them; programs do where
// nothing else would. An Event says so. No request fails, and programs serve again when reading works.
func TestUnreadFilters(t *testing.T) {
	t.Run("rules", func(t *testing.T) { unreadFilters(t, 12, "clients outside are left to iptables rules") })
	t.Run("no fallback", func(t *testing.T) {
		unreadFilters(t, 0, "eBPF programs serve clients outside, past filters that may be among them", "--ebpf-fallback=none")
	})
}

// unreadFilters has rules serve so many frontends, and an Event say so.
func unreadFilters(t *testing.T, byRules int, says string, args ...string) {
	tools := t.TempDir()
	broken := filepath.Join(tools, "broken")
	for _, name := range []string{"iptables-legacy", "ip6tables-legacy"} {
		save, err := exec.LookPath(name + "-save")
		if err != nil {
			lab.SkipOrFail(t, err)
		}
		script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *raw*) [ ! -e %s ] || exit 1;; esac\nexec %s \"$@\"\n", broken, save)
		if err := os.WriteFile(filepath.Join(tools, name+"-save"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", tools+":"+os.Getenv("PATH"))
	s := newStage(t)
	if out, err := s.node.Command(t.Context(), "iptables-legacy", "-t", "raw", "-A", "PREROUTING", "-p", "tcp", "--dport", "9", "-j", "DROP").CombinedOutput(); err != nil {
		lab.SkipOrFail(t, fmt.Errorf("legacy iptables: %w: %s", err, out))
	}
	s.start(append(args, "--ebpf-sync-period=1s")...)
	defer s.end()
	s.serves(t)
	w := lab.NewLoad(t)
	defer w.End()
	s.ask(w, gently)
	long := s.open()
	unread := func(want int) func() error {
		return func() error {
			_, body, err := s.node.Get(context.Background(), 10249, "/debug/carriers")
			if n := strings.Count(body, `"carrier":"iptables","reason":"it filters packets before DNAT: rules that cannot be read (`); err != nil || n != want {
				return fmt.Errorf("rules serve %d frontends because filters are unknown, want %d: %s %w", n, want, body, err)
			}
			return nil
		}
	}
	s.await(t, "programs to serve", unread(0))
	if err := os.WriteFile(broken, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.await(t, "the log", s.Says("Cannot read all rules that filter packets of Services"))
	s.await(t, "the Event", s.Says(says))
	s.await(t, "rules to serve, or programs", unread(byRules))
	w.More(100)
	checkAll(t, long)
	if err := os.Remove(broken); err != nil {
		t.Fatal(err)
	}
	s.await(t, "programs to serve again", unread(0))
	w.More(100)
	checkAll(t, long)
	w.End()
	few(t, w)
}
