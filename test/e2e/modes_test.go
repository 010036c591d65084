// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// The mode changes under traffic and back: established connections survive, and new
// connections succeed all the time. Leftovers of the previous mode are removed.
func TestModes(t *testing.T) {
	s := newStage(t)
	s.start("--proxy-mode=iptables")
	s.keepsUDP()
	defer func() {
		s.end()
		if left := rules(t, s.node); strings.Contains(left, "KUBE-") {
			t.Errorf("left by --cleanup:\n%s", left)
		}
		if on := devicesWithPrograms(t, s.node); len(on) > 0 {
			t.Errorf("after the cleanup there are programs on %v", on)
		}
	}()
	long := s.open()
	w := lab.NewLoad(t)
	defer w.End()
	s.ask(w, gently)
	for i, mode := range []string{"ebpf", "iptables", "ebpf"} {
		s.start("--proxy-mode=" + mode)
		s.await(t, "mode "+mode, func() error {
			if mode == "ebpf" {
				return holds(t, s.node, "KUBE-SERVICES", false)
			}
			return errors.Join(holds(t, s.node, "-j KUBE-SERVICES", true), s.Says("accept no new connections")())
		})
		if _, body, err := s.node.Get(t.Context(), 10249, "/proxyMode"); err != nil || body != mode {
			t.Errorf("/proxyMode says %q in mode %s: %v", body, mode, err)
		}
		if i == 0 {
			s.serves(t)
			long = append(long, openFlows(t, s.far.Sandbox, outside(s.node), s.here, s.there)...)
		}
		checkAll(t, long)
		w.More(100)
		if t.Failed() {
			break
		}
	}
	w.End()
	few(t, w)
}

// If programs cannot serve a device, existing rules remain and are kept up to date until they
// can.
func TestFallbackStandsIn(t *testing.T) {
	s := newStage(t)
	s.start("--proxy-mode=iptables")
	defer s.end()
	ways := outside(s.node)
	tcp := lab.NewLoad(t)
	defer tcp.End()
	tcp.Use(s.far.Sandbox, over("tcp", ways), gently)
	s.open()

	uplink, err := s.node.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	// A foreign program, which prevents attachment.
	foreign := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: uplink.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS}}
	if err := s.node.Netlink().QdiscAdd(foreign); err != nil {
		t.Fatal(err)
	}
	// While a qdisc is added or removed, the kernel drops packets, and clients do not repeat datagrams.
	udp := lab.NewLoad(t)
	defer udp.End()
	udp.Use(s.far.Sandbox, over("udp", ways), gently)
	more := func() {
		t.Helper()
		tcp.More(100)
		udp.More(100)
	}
	s.Terminate(t)
	s.process = start(t, s.node, s.dir, "--ebpf-capability-mask=tcx=no", "--ebpf-sync-period=1s") // no sync succeeds
	s.await(t, "the fallback", s.Says("the fallback serves all Services until one succeeds"))
	more()
	writeManifests(t, s.dir, loadBalancer, s.there)
	s.await(t, "the change in rules", func() error {
		return errors.Join(holds(t, s.node, s.here.Addr4.String(), false), holds(t, s.node, s.here.Addr6.String(), false))
	})
	more()
	udp.End()
	few(t, udp)
	if err := s.node.Netlink().QdiscDel(foreign); err != nil {
		t.Fatal(err)
	}
	s.await(t, "programs", func() error { return holds(t, s.node, "KUBE-SERVICES", false) })
	udp = lab.NewLoad(t)
	defer udp.End()
	udp.Use(s.far.Sandbox, over("udp", ways), gently)
	more()
	for _, w := range []*lab.Load{tcp, udp} {
		w.End()
		few(t, w)
	}
}

// UDP flows that rules translated survive the change to programs as long as their endpoints
// exist. Then they get other endpoints. Sockets of this node are closed instead: socket
// programs handle only new sockets.
func TestFlowsTakenOver(t *testing.T) {
	s := newStage(t, lab.Options{Pause: true}) // pods show in /proc
	s.start("--proxy-mode=iptables")
	s.keepsUDP()
	defer s.end()
	translated := openFlows(t, s.far.Sandbox, outside(s.node), s.here, s.there)
	hooked := append(openFlows(t, s.client.Sandbox, targets(), s.here, s.there), openFlows(t, s.node.Sandbox, targets(), s.here, s.there)...)
	s.start()
	s.serves(t)
	s.await(t, "no rules", func() error { return holds(t, s.node, "KUBE-SERVICES", false) })
	checkAll(t, append(translated, hooked...))
	writeManifests(t, s.dir, loadBalancer, s.there)
	lost := 0
	for _, f := range hooked {
		if f.RemoteAddr().Network() == "tcp" || f.first.Server == s.there.Name {
			f.check(t)
			continue
		}
		lost++
		if err := f.SetReadDeadline(time.Now().Add(10 * time.Second * lab.Slower())); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) {
			t.Errorf("a socket whose endpoint is gone: %v", err)
		}
	}
	if lost == 0 {
		t.Error("no socket of this node used the removed endpoint")
	}
	for name, to := range targets() {
		for _, from := range []*lab.Sandbox{s.client.Sandbox, s.node.Sandbox} {
			s.await(t, fmt.Sprintf("a new socket of %s to %s", from.Name, name), func() error { // each family is a change of its own
				r, err := from.Ask(t.Context(), name[:3], to)
				if err == nil && r.Server != s.there.Name {
					err = fmt.Errorf("%s answers", r.Server)
				}
				return err
			})
		}
	}
	for _, f := range translated {
		if f.RemoteAddr().Network() == "tcp" {
			f.check(t) // it may end by itself
			continue
		}
		s.await(t, fmt.Sprintf("another endpoint for %s", f.LocalAddr()), func() error {
			switch r, err := lab.AskConn(t.Context(), f); {
			case err != nil:
				return err
			case r.Server != s.there.Name:
				return fmt.Errorf("%s answers", r.Server)
			}
			return nil
		})
	}
}

// TestConnectionsOfModeNFTables: connections that upstream's mode nftables translated continue when
// programs take over and its table, which has the only chains that translate, is removed.
func TestConnectionsOfModeNFTables(t *testing.T) {
	s := newStage(t)
	rules := s.node.Command(t.Context(), "nft", "-f", "-")
	rules.Stdin = strings.NewReader(fmt.Sprintf(`table ip kube-proxy {
		chain services { type nat hook prerouting priority -100; ip daddr %s tcp dport 80 dnat to %s:%d; }
	}`, vip4.Addr(), s.here.Addr4, targetPort))
	if out, err := rules.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	open := openFlows(t, s.client.Sandbox, map[string]netip.AddrPort{"tcp4": vip4}, s.here)
	s.start("--ebpf-fallback=none")
	defer s.end()
	s.await(t, "its table to be removed", s.Says("Removed tables of mode nftables"))
	checkAll(t, open)
}

// Fallbacks: the capability mask says that the kernel does not support mode ebpf; the kernel
// does not support mode ipvs; the process lacks a capability for mode ebpf.
func TestFallback(t *testing.T) {
	for name, c := range map[string]struct {
		lacks    uintptr // a capability
		flags    []string
		fallback string
		why      string
	}{
		"iptables":              {0, []string{"--ebpf-capability-mask=connect4=no"}, "iptables", "connect4"},
		"without CAP_SYS_ADMIN": {unix.CAP_SYS_ADMIN, nil, "iptables", "needs CAP_SYS_ADMIN"},
		"after ipvs": {
			0, []string{"--ebpf-capability-mask=connect4=no,ipvs=yes,ipvs_schedulers=yes", "--ipvs-scheduler=best"},
			"ipvs,iptables", "mode ipvs failed a trial run",
		},
	} {
		t.Run(name, func(t *testing.T) {
			testFallback(t, c.fallback, c.why, func(n *lab.Node, dir, fallback string) *process {
				p := of(n, dir, append(slices.Clone(c.flags), "--ebpf-fallback="+fallback)...)
				if c.lacks != 0 {
					p.without(c.lacks)
				}
				return p
			})
		})
	}
}

func testFallback(t *testing.T, fallback, why string, of func(n *lab.Node, dir, fallback string) *process) {
	l := lab.NewT(t)
	n := l.Node("node1")
	web, client := serve(t, n.Pod("web")), n.Pod("client")
	dir := t.TempDir()
	writeManifests(t, dir, clusterIPs, web)
	p := begin(t, of(n, dir, fallback))
	defer func() {
		_ = p.Close()
		cleanup(t, n)
	}()
	p.synced(t)
	await(t, "the fallback serves", reaches(client.Sandbox, vip4, "web"))
	for path, want := range map[string]string{
		"/proxyMode":      "iptables",
		"/debug/carriers": `"clients":"all","carrier":"iptables","reason":""`,
		"/metrics":        `tandem_proxy_mode{mode="iptables",reason="fallback"} 1`,
	} {
		if _, body, err := n.Get(t.Context(), 10249, path); err != nil || !strings.Contains(body, want) {
			t.Errorf("%s does not say %s: %v", path, want, err)
		}
	}
	warning := regexp.MustCompile(`(?m)^W\d{4} .*\] "?Mode iptables runs instead of ebpf: .*` + regexp.QuoteMeta(why))
	if n := len(warning.FindAllString(p.Log.String(), -1)); n != 1 {
		t.Errorf("the log warns %d times of the fallback with its reason, want once:\n%s", n, p.Log)
	}
	if strings.Contains(p.Log.String(), "Cannot clean up after another mode") {
		t.Error("the log complains about programs although there are none")
	}

	refuses := of(n, dir, "none")
	if err := refuses.Run(); err == nil || !strings.Contains(refuses.Log.String(), "no fallback is configured") {
		t.Errorf("without a fallback: %v\n%s", err, refuses.Log)
	}
}

// If programs cannot translate packets, socket programs still serve this node, and rules
// serve all other clients.
func TestRulesForPackets(t *testing.T) {
	s := newStage(t)
	s.start("--ebpf-capability-mask=redirect_neigh=no")
	defer s.end()
	s.open()
	if on := devicesWithPrograms(t, s.node); len(on) > 0 {
		t.Errorf("there are programs on %v", on)
	}
	for query, want := range map[string]string{
		"src=198.51.100.1&dst=203.0.113.10:80&device=eth0": `"name":"iptables","carries":true`,
		"src=127.0.0.1&dst=10.96.0.10:80":                  `"name":"ebpf","carries":true`,
	} {
		if _, body, err := s.node.Get(t.Context(), 10249, "/debug/explain?"+query); err != nil || !strings.Contains(body, want) {
			t.Errorf("explain %s does not say %s: %v %s", query, want, err, body)
		}
	}
}

// rules returns the rules of both variants and families, without kubelet's, which are never
// removed.
func rules(t testing.TB, n *lab.Node) string {
	t.Helper()
	var all strings.Builder
	for _, program := range []string{"iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save"} {
		out, err := n.Command(context.Background(), program).Output()
		if err != nil {
			t.Fatalf("%s: %v", program, err)
		}
		for line := range strings.Lines(string(out)) {
			if !strings.Contains(line, "KUBE-FIREWALL") {
				all.WriteString(line)
			}
		}
	}
	return all.String()
}

func holds(t testing.TB, n *lab.Node, text string, want bool) error {
	if all := rules(t, n); strings.Contains(all, text) != want {
		return fmt.Errorf("the rules hold %q: %v\n%s", text, !want, all)
	}
	return nil
}

// keepsUDP has conntrack keep UDP flows for longer than half a minute, or two with several requests, which is
// too short on an emulated machine.
func (s *stage) keepsUDP() {
	s.t.Helper()
	if err := s.node.Do(func() error {
		const setting = "/proc/sys/net/netfilter/nf_conntrack_udp_timeout"
		return errors.Join(os.WriteFile(setting, []byte("600"), 0), os.WriteFile(setting+"_stream", []byte("600"), 0))
	}); err != nil {
		s.t.Fatal(err)
	}
}

// Changes to and from mode ipvs, and kills, under traffic: established connections survive, and
// new connections succeed all the time. Leftovers of the previous mode are removed once unused.
func TestIPVS(t *testing.T) {
	s := newStage(t, lab.Options{PortsInTurn: true})
	upstream.NeedsIPVS(t, s.node)
	s.keepsUDP()
	s.start("--proxy-mode=iptables")
	defer func() {
		s.end()
		if left := rules(t, s.node); strings.Contains(left, "KUBE-") {
			t.Errorf("left by --cleanup:\n%s", left)
		}
	}()
	long := s.open()
	w := lab.NewLoad(t)
	defer w.End()
	s.everybody(func(from *lab.Sandbox, ways map[string]netip.AddrPort) { w.Use(from, ways, slowly) })
	before := ""
	for _, mode := range []string{"ipvs", "iptables", "ipvs", "ebpf", "ipvs", "ipvs"} {
		if mode == "ebpf" && !kernel.HasPrograms() {
			t.Log("not through mode ebpf: this kernel cannot carry programs")
			continue
		}
		if before == mode {
			_ = s.Close()
			s.process = nil
		}
		before = mode
		s.start("--proxy-mode=" + mode)
		s.await(t, "mode "+mode, func() error {
			there, err := counterThere(s.node) // mode ipvs has none, like upstream
			if err == nil && there == (mode == "ipvs") {
				err = fmt.Errorf("counters of rules are there: %v", there)
			}
			return errors.Join(err, holds(t, s.node, "KUBE-IPVS-FILTER", mode == "ipvs"), holds(t, s.node, "KUBE-SERVICES", mode != "ebpf"))
		})
		if _, body, err := s.node.Get(t.Context(), 10249, "/proxyMode"); err != nil || body != mode {
			t.Errorf("/proxyMode says %q in mode %s: %v", body, mode, err)
		}
		w.More(100)
		checkAll(t, long)
		if t.Failed() {
			return
		}
		long = append(long, s.open()...)
	}
	w.End()
	few(t, w)
}
