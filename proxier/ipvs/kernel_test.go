// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/ipvs/vserver"
	"github.com/tandem-proxy/tandem/proxier/proxiertest"
	"github.com/tandem-proxy/tandem/test/lab"
)

// stage is a node with two pods that answer, and one that asks.
type stage struct {
	t           *testing.T
	opts        Options
	lab         *lab.Lab
	node        *lab.Node
	web1, web2  *lab.Pod
	shell       *lab.Pod
	vip         netip.AddrPort
	tier        *Tier
	restores    int
	writes      int
	clock       *testingclock.FakeClock
	frontends   []proxier.Frontend
	externalVIP netip.AddrPort
}

func newStage(t *testing.T) *stage {
	t.Helper()
	s := &stage{t: t, opts: needs(t), vip: netip.MustParseAddrPort("10.96.0.10:80"), externalVIP: netip.MustParseAddrPort("203.0.113.10:80")}
	s.clock = testingclock.NewFakeClock(time.Now())
	s.opts.Clock = s.clock
	s.lab = lab.NewT(t)
	s.node = s.lab.Node("node1")
	s.web1, s.web2, s.shell = s.node.Pod("web1"), s.node.Pod("web2"), s.node.Pod("shell")
	for _, p := range []*lab.Pod{s.web1, s.web2} {
		if _, err := p.ServeTCP(8080); err != nil {
			t.Fatal(err)
		}
	}
	s.frontends = []proxier.Frontend{
		{Addr: s.vip, Kind: proxier.ClusterIP, Routes: everybody},
		{Addr: s.externalVIP, Kind: proxier.LoadBalancer, Routes: hidden},
		{Addr: netip.MustParseAddrPort("0.0.0.0:30080"), Kind: proxier.NodePort, Routes: hidden},
	}
	return s
}

var hidden = [proxier.Origins]proxier.Route{{Source: proxier.AnySource}, {Source: proxier.Masquerade}, {Source: proxier.Masquerade}}

// begin begins the life of another process.
func (s *stage) begin() {
	s.t.Helper()
	opts := s.opts
	opts.Tools = &countingTools{opts.Tools.(iptables.Tools), &s.restores}
	s.tier = onNode(s.t, s.node, opts)
	s.t.Cleanup(func() { _ = s.tier.Close() })
	s.tier.servers.kernel = &countingServers{s.tier.servers.kernel, &s.writes}
	s.tier.addrs.kernel = &countingObjects[netip.Addr]{s.tier.addrs.kernel, &s.writes}
	s.tier.members.kernel = &countingObjects[member]{s.tier.members.kernel, &s.writes}
}

type countingTools struct {
	iptables.Tools
	n *int
}

func (c *countingTools) Restore(ctx context.Context, f proxier.Family, input []byte) error {
	*c.n++
	return c.Tools.Restore(ctx, f, input)
}

type countingServers struct {
	vserver.Kernel
	n *int
}

func (c *countingServers) Add(k serverKey, is server) error {
	*c.n++
	return c.Kernel.Add(k, is)
}

func (c *countingServers) Change(k serverKey, is server) error {
	*c.n++
	return c.Kernel.Change(k, is)
}

func (c *countingServers) AddDestination(k serverKey, to netip.AddrPort, weight int) error {
	*c.n++
	return c.Kernel.AddDestination(k, to, weight)
}

func (c *countingServers) ChangeDestination(k serverKey, to netip.AddrPort, weight int) error {
	*c.n++
	return c.Kernel.ChangeDestination(k, to, weight)
}

type countingObjects[K comparable] struct {
	objects[K]
	n *int
}

func (c *countingObjects[K]) Add(k K) error {
	*c.n++
	return c.objects.Add(k)
}

func (c *countingObjects[K]) Delete(k K) error {
	*c.n++
	return c.objects.Delete(k)
}

// service is one with those pods as endpoints.
func (s *stage) service(pods ...*lab.Pod) *proxier.Decision {
	name := proxier.ServicePortName{Protocol: proxier.TCP}
	name.Namespace, name.Name = "default", "web"
	d := proxiertest.Decision(name, 0)
	d.Frontends = s.frontends
	for _, p := range pods {
		d.Backends = append(d.Backends, proxier.Backend{Addr: netip.AddrPortFrom(p.Addr4, 8080), Members: proxier.InCluster, Local: true})
	}
	return d
}

// sync syncs; a full one has the rules of the node.
func (s *stage) sync(full bool, list ...*proxier.Decision) {
	s.t.Helper()
	u := proxier.Update{Full: full}
	if full {
		u.NodeRules = &proxier.NodeRules{LocalAddrs: []netip.Addr{s.node.Addr4}, NodePortAddrs: []netip.Addr{s.node.Addr4}}
	}
	for _, d := range list {
		u.Changes = append(u.Changes, proxier.PortChange{New: d})
	}
	if err := s.tier.Sync(s.t.Context(), u); err != nil {
		s.t.Fatal(err)
	}
}

// run runs a command on the node.
func (s *stage) run(args ...string) string {
	s.t.Helper()
	out, err := s.node.Command(s.t.Context(), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		s.t.Fatalf("%s: %v: %s", args, err, out)
	}
	return string(out)
}

// asks has the pod call, and says who answered.
func (s *stage) asks(to netip.AddrPort) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), 10*time.Second)
	defer cancel()
	reply, err := s.shell.Ask(ctx, "tcp", to)
	return reply.Server, err
}

// TestKernelWalk: every kind of frontend is answered by both pods; a second full sync and
// another process write nothing; settings are set.
func TestKernelWalk(t *testing.T) {
	s := newStage(t)
	s.begin()
	all := s.service(s.web1, s.web2)
	s.sync(true, all)
	for _, to := range []netip.AddrPort{s.vip, s.externalVIP, netip.AddrPortFrom(s.node.Addr4, 30080)} {
		seen := map[string]bool{}
		for range 4 {
			who, err := s.asks(to)
			if err != nil {
				t.Fatalf("%s: %v\n%s", to, err, s.run("ipvsadm", "-Ln"))
			}
			seen[who] = true
		}
		if len(seen) != 2 {
			t.Errorf("%s: answered by %v alone", to, seen)
		}
	}
	s.restores, s.writes = 0, 0
	s.sync(true, all)
	if s.restores+s.writes > 0 {
		t.Errorf("a full sync writes %d rules and %d objects for nothing", s.restores, s.writes)
	}
	s.begin()
	s.restores, s.writes = 0, 0
	s.sync(true, all)
	if s.restores+s.writes > 0 {
		t.Errorf("another process writes %d rules and %d objects for nothing", s.restores, s.writes)
	}
	err := s.node.Do(func() error {
		for _, x := range s.opts.settings(release()) {
			if b, err := os.ReadFile("/proc/sys/" + x.name); err != nil || strings.TrimSpace(string(b)) != x.value {
				t.Errorf("%s is %s, %v; want %s", x.name, b, err, x.value)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	// No endpoint: the connection is refused at once.
	s.sync(false, s.service())
	began := time.Now()
	if _, err := s.asks(s.vip); err == nil || time.Since(began) > 5*time.Second {
		t.Errorf("no endpoint: %v after %s", err, time.Since(began))
	}
}

// TestKernelDrain: connections go on to an endpoint that is gone, and to a Service that
// is, for as long as the deadline says.
func TestKernelDrain(t *testing.T) {
	s := newStage(t)
	s.begin()
	s.sync(true, s.service(s.web1))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conn, err := s.shell.DialFrom(ctx, "tcp", 0, s.vip)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	goesOn := func(when string) {
		t.Helper()
		reply, err := lab.AskConn(ctx, conn)
		if err != nil || reply.Server != "web1" {
			t.Errorf("%s: %v, %v\n%s", when, reply, err, s.run("ipvsadm", "-Ln"))
		}
	}
	goesOn("at first")
	s.sync(false, s.service(s.web2))
	goesOn("the endpoint is gone")
	for range 4 {
		if who, err := s.asks(s.vip); err != nil || who != "web2" {
			t.Errorf("a new connection is led to %q, %v", who, err)
		}
	}
	s.begin() // a process that knows nothing of it
	s.sync(true, s.service(s.web2))
	goesOn("another process")
	// The Service goes, but for its connections.
	s.sync(true)
	goesOn("the Service is gone")
	if _, err := s.asks(s.vip); err == nil {
		t.Error("a Service that is gone takes new connections")
	}
	if rest := s.run("ipvsadm", "-Sn"); strings.Count(rest, "-A ") != 1 {
		t.Errorf("what has no connections stays:\n%s", rest)
	}
	// It comes back, and connections to the endpoint that is gone still go on.
	s.sync(false, s.service(s.web2))
	goesOn("the Service is back")
	s.sync(true)
	s.clock.Step(16 * time.Minute)
	s.sync(true)
	if rest := s.run("ipvsadm", "-Sn") + s.run("ip", "-o", "addr", "show", "dev", Device); rest != "" {
		t.Errorf("after the deadline there is still\n%s", rest)
	}
}

// TestKernelRepair: what another program does is undone, and remnants of an earlier process are
// neither obeyed nor left. Excluded virtual servers stay.
func TestKernelRepair(t *testing.T) {
	s := newStage(t)
	s.opts.ExcludeCIDRs = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	s.begin()
	d := s.service(s.web1, s.web2)
	s.sync(true, d)
	look := func() string {
		return s.run("sh", "-c", "ipvsadm -Sn | sort; ip -o addr show dev "+Device+" | grep -o 'inet.*/[0-9]*' | sort; ipset save | sort; iptables-save | grep -v '^[#:]'")
	}
	want := look()
	web1 := netip.AddrPortFrom(s.web1.Addr4, 8080).String()
	for _, damage := range []string{
		"ipvsadm -e -t 10.96.0.10:80 -r " + web1 + " -m -w 0",
		"ipvsadm -d -t 10.96.0.10:80 -r " + web1,
		"ipvsadm -a -t 10.96.0.10:80 -r 10.244.1.99:8080 -m",
		"ipvsadm -D -t 10.96.0.10:80",
		"ipvsadm -E -t 10.96.0.10:80 -s wrr",
		"ipvsadm -A -t 10.96.0.99:80",
		"ip addr del 10.96.0.10/32 dev " + Device,
		"ip addr add 10.96.0.99/32 dev " + Device,
		"ip link del " + Device,
		"ipset del KUBE-CLUSTER-IP 10.96.0.10,tcp:80",
		"ipset add KUBE-NODE-PORT-TCP 31000",
		"ipset flush",
		"iptables -t nat -F KUBE-SERVICES",
		"iptables -D INPUT 1",
	} {
		s.run("sh", "-c", damage)
		s.sync(true, d)
		s.sync(true, d) // what has no connection is seen to have none
		if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(look(), "\n")); diff != "" {
			t.Errorf("%s:\n%s", damage, diff)
		}
	}
	s.run("ipvsadm", "-A", "-t", "192.0.2.1:80")
	s.sync(true, d)
	if !strings.Contains(look(), "192.0.2.1:80") {
		t.Error("an excluded virtual server is gone")
	}
}

// TestKernelCleanup: nothing of this proxy is left, and nothing foreign is touched.
func TestKernelCleanup(t *testing.T) {
	s := newStage(t)
	s.opts.ExcludeCIDRs = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	look := func() string {
		return s.run("sh", "-c", "ipvsadm -Sn | sort; ip -o link | grep -v 'if[0-9]*:' | cut -d' ' -f2; ipset list -n; for t in iptables ip6tables; do $t-save | grep -e '^-A' -e '^:.* - ' | grep -v DRAIN; done; ip route show table local | sort")
	}
	s.begin()
	s.run("sh", "-c", "ipvsadm -A -t 198.51.100.7:80; ipset create FOREIGN hash:ip; iptables -A FORWARD -m set --match-set FOREIGN src -j ACCEPT; iptables -t mangle -N FOREIGN; iptables -t nat -L -n >/dev/null; ip6tables -t mangle -L -n >/dev/null; ip6tables -t nat -L -n >/dev/null")
	before := look()
	s.sync(true, s.service(s.web1))
	s.run("ipvsadm", "-A", "-t", "192.0.2.1:80")
	s.run("ipvsadm", "-D", "-t", "192.0.2.1:80")
	s.run("sh", "-c", "ipvsadm -A -t 198.51.100.7:80 2>&1 || true")
	if err := s.tier.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(look(), "\n")); diff != "" {
		t.Errorf("after cleaning up:\n%s", diff)
	}
	// The tier serves again, and without one it goes as well.
	s.sync(true, s.service(s.web1))
	if _, err := s.asks(s.vip); err != nil {
		t.Errorf("serving again: %v", err)
	}
	s.run("sh", "-c", "ipvsadm -A -t 198.51.100.7:80 2>&1 || true")
	err := s.node.Do(func() error {
		return errors.Join(iptables.Cleanup(t.Context(), s.opts.Tools.(iptables.Tools), true), Cleanup(t.Context(), s.opts))
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(look(), "\n")); diff != "" {
		t.Errorf("after cleaning up without a tier:\n%s", diff)
	}
}

// TestKernelCanUse: it says what is missing, and leaves nothing.
func TestKernelCanUse(t *testing.T) {
	s := newStage(t)
	look := func() string {
		return s.run("sh", "-c", "ipvsadm -Sn; ip -o link | cut -d' ' -f2; ipset list -n; iptables-save | grep KUBE || true")
	}
	before := look()
	for _, scheduler := range []string{"", "rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh"} {
		opts := s.opts
		opts.Scheduler = scheduler
		if err := s.node.Do(func() error { return CanUse(t.Context(), opts) }); err != nil {
			t.Errorf("scheduler %q: %v", scheduler, err)
		}
	}
	opts := s.opts
	opts.Scheduler = "best"
	if err := s.node.Do(func() error { return CanUse(t.Context(), opts) }); err == nil || !strings.Contains(err.Error(), "ip_vs_best") {
		t.Errorf("a scheduler that is not there: %v", err)
	}
	// A process that was killed meanwhile costs the next one nothing.
	for _, left := range []string{
		"ipvsadm -A -t 198.51.100.0:20000; ipvsadm -A -t [2001:db8::]:20000", "ip link add kube-ipvs-probe type dummy",
		"ipset create KUBE-PROBE-hash:ip hash:ip", "ipset create KUBE-PROBE-bitmap:port bitmap:port range 0-65535",
	} {
		s.run("sh", "-c", left)
		if err := s.node.Do(func() error { return CanUse(t.Context(), s.opts) }); err != nil {
			t.Errorf("after %s: %v", left, err)
		}
	}
	if after := look(); after != before {
		t.Errorf("it leaves something:\n%s", cmp.Diff(before, after))
	}
}

// TestKernelSchedulers: destinations of a scheduler that hashes get connections, also
// while one is draining.
func TestKernelSchedulers(t *testing.T) {
	s := newStage(t)
	for _, scheduler := range []string{"mh", "sh", "wlc"} {
		s.opts.Scheduler = scheduler
		s.begin()
		s.sync(true, s.service(s.web1, s.web2))
		s.sync(false, s.service(s.web2))
		for range 8 {
			if who, err := s.asks(s.vip); err != nil || who != "web2" {
				t.Errorf("%s: %q, %v\n%s", scheduler, who, err, s.run("ipvsadm", "-Ln"))
			}
		}
	}
}

// TestKernelUpstream: with upstream's semantics no rule knows of a Service. With a Local
// policy endpoints here see who called, and others serve where there is none here.
func TestKernelUpstream(t *testing.T) {
	s := newStage(t)
	s.opts.UpstreamSemantics = true
	for i := range s.frontends[1:] {
		s.frontends[1+i].Routes = [proxier.Origins]proxier.Route{{}, {Source: proxier.Masquerade}, {Set: proxier.V4Local}}
	}
	s.begin()
	d := s.service(s.web1, s.web2)
	d.Backends[0].Members |= proxier.InLocal
	s.sync(true, d)
	external := []netip.AddrPort{s.externalVIP, netip.AddrPortFrom(s.node.Addr4, 30080)}
	for _, to := range external {
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			reply, err := s.shell.Ask(ctx, "tcp", to)
			cancel()
			if err != nil || reply.Server != "web1" || reply.Peer.Addr() != s.shell.Addr4 {
				t.Errorf("%s: %+v, %v", to, reply, err)
			}
		}
	}
	if rules := s.run("iptables-save"); strings.Contains(rules, "KUBE-SVC") || strings.Contains(rules, "KUBE-EXT-") {
		t.Errorf("rules know of the Service:\n%s", rules)
	}
	d = s.service(s.web2)
	d.Empty[proxier.V4Local] = proxier.Drop
	s.sync(false, d)
	for _, to := range external {
		if who, err := s.asks(to); err != nil || who != "web2" {
			t.Errorf("without an endpoint here: %s: %q, %v", to, who, err)
		}
	}
}
