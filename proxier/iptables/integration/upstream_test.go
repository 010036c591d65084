// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// withUpstream returns upstream's binary, and tools of the variant that it uses, on a lab node.
func withUpstream(t *testing.T) (binary string, tools *labTools) {
	t.Helper()
	binary = upstream.BinaryT(t)
	tools = newLabTools(t, xtables.NFT)
	list, err := tools.at.Command(t.Context(), "iptables", "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(list), "nf_tables") {
		tools.Tools, err = xtables.New(xtables.Legacy)
	}
	if err != nil {
		t.Fatal(err)
	}
	return binary, tools
}

func startUpstream(t *testing.T, binary string, tools *labTools, objects []fakeapi.Object) *upstream.Proxy {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel) // ends the process
	p, err := upstream.Start(ctx, tools.at, upstream.Options{Binary: binary, Mode: "iptables", Objects: objects, Args: upstream.Flags})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// objectsOf returns that many Services of many kinds, and their EndpointSlices.
func objectsOf(services int) (list []fakeapi.Object) {
	for i := range services {
		list = append(list, service(i, kindOf(i)...))
		if i%10 == 7 {
			continue
		}
		addrs := []string{pod(3 * i), pod(3*i + 1), fmt.Sprintf("10.244.200.%d", 1+i)}
		if i%10 == 5 {
			addrs = addrs[2:]
		}
		list = append(list, endpoints(i, addrs...), endpoints(i, fmt.Sprintf("fd00:10:244:1::%x", 1+i), fmt.Sprintf("fd00:10:244:2::%x", 1+i)))
	}
	for i, change := range [][]func(*v1.Service){
		{balanced(services)},
		{balanced(services + 5), externalLocal, healthCheck(32000)},
		{balanced(services+1, "198.51.100.0/24", "203.0.113.0/24")},
		{nodePort(int32(30000 + services + 2)), externalLocal},
		{internalLocal, nodePort(int32(30000 + services + 3))},
		{sticky, externalLocal, nodePort(int32(30000 + services + 4))},
	} {
		i += services
		list = append(list, service(i, change...), endpoints(i, pod(3*i)), endpoints(i, fmt.Sprintf("fd00:10:244:1::%x", 1+i)))
	}
	return list
}

// tell calls the node's event handlers with the objects.
func (n *node) tell(objects []fakeapi.Object) {
	for _, o := range objects {
		switch o := o.(type) {
		case *v1.Service:
			n.OnServiceAdd(o)
		case *discoveryv1.EndpointSlice:
			n.OnEndpointSliceAdd(o)
		}
	}
}

// meant are the intended differences from upstream: a regular expression for the lines of
// TestAsUpstream, and the reason.
var meant = []struct{ difference, reason string }{
	{"^theirs nat KUBE-FW-.* -m comment --comment \"other traffic to .* will be dropped by KUBE-PROXY-FIREWALL\"$",
		"a rule without target is a comment"},
	{"^theirs nat KUBE-NODEPORTS -d 127.0.0.0/8 .* -m nfacct ", "one rule for each counts connections to loopback addresses"},
	{"^ours nat KUBE-MARK-MASQ -d 127.0.0.0/8 .* -m nfacct ", "one rule counts for all of them"},
	{"^ours nat KUBE-SERVICES -d .* -p (icmp|ipv6-icmp) .* -j REDIRECT$", "load balancer IPs answer echo requests"},
	{"^ours filter KUBE-PROXY-FIREWALL .* -j KUBE-REFUSED-PORTS$", "NodePorts have a chain of their own there too"},
	{"^ours chain filter KUBE-REFUSED-PORTS$", "NodePorts have a chain of their own there too"},
	{"^order filter (INPUT|FORWARD|OUTPUT)$", "rejecting comes before dropping"},
	{"^(theirs filter FORWARD|ours filter KUBE-SERVICES) .* -j KUBE-EXTERNAL-SERVICES$", "connections of this host to an external IP without endpoints are rejected, too"},
	{"^ours nat KUBE-FW-.* -j ACCEPT$", "clients outside the source ranges do not reach a NodePort of the same number"},
	{"^(theirs nat KUBE-SERVICES|ours nat KUBE-SERVICES ! -d 127.0.0.0/8) -m comment .* --dst-type LOCAL -j KUBE-NODEPORTS$", "loopback addresses have a rule of their own"},
	{"^ours nat KUBE-SERVICES -d 127.0.0.0/8 .* --src-type LOCAL -j KUBE-NODEPORTS$", "neighbours do not reach NodePorts at loopback addresses"},
	{"^ours filter KUBE-NODEPORTS .* health check node port", "load balancers ask nodes in both families, also about Services of one"},
	{"^order nat KUBE-FW-", "source ranges are sorted"},
	{"^theirs (chain filter KUBE-FIREWALL|filter (INPUT|OUTPUT) -j KUBE-FIREWALL)$", "IPv6 has no route_localnet"},
}

// TestAsUpstream: rules are the same as upstream's, chain by chain, except for intended differences.
func TestAsUpstream(t *testing.T) {
	binary, tools := withUpstream(t)
	objects := objectsOf(20)
	p := startUpstream(t, binary, tools, objects)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	n := newSimulatedNode(t, tools.at)
	n.open(iptablestest.Facts, proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}})
	n.tell(objects)
	n.MustSync()
	used := map[int]bool{}
	for f := range proxier.Families {
		all := differences(contents(t, n.Tools, f), contents(t, tools, f))
		for _, d := range all {
			i := slices.IndexFunc(meant, func(m struct{ difference, reason string }) bool {
				return regexp.MustCompile(m.difference).MatchString(d)
			})
			if used[i] = true; i < 0 {
				t.Errorf("%s: %s", f, d)
			}
		}
	}
	for i, m := range meant {
		if !used[i] {
			t.Errorf("an intended difference does not exist: %s", m.difference)
		}
	}
}

// without returns the elements of a that are not in b.
func without(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(r string) bool { return slices.Contains(b, r) })
}

// differences lists those between the proxy's chains and upstream's. The order of rules in shared
// chains is ignored.
func differences(ours, theirs map[string][]string) (list []string) {
	for _, at := range slices.Sorted(maps.Keys(ours)) {
		their, both := theirs[at]
		if !both {
			list = append(list, "ours chain "+at)
		}
		for _, r := range without(ours[at], their) {
			list = append(list, "ours "+at+" "+r)
		}
		for _, r := range without(their, ours[at]) {
			list = append(list, "theirs "+at+" "+r)
		}
		common := func(r string) bool { return !slices.Contains(ours[at], r) || !slices.Contains(their, r) }
		if both && iptablestest.SharedChainOf(at) == nil && !slices.Equal(slices.DeleteFunc(slices.Clone(ours[at]), common), slices.DeleteFunc(slices.Clone(their), common)) {
			list = append(list, "order "+at)
		}
	}
	for _, at := range slices.Sorted(maps.Keys(theirs)) {
		if _, both := ours[at]; !both {
			list = append(list, "theirs chain "+at)
		}
	}
	return list
}

// load is clients that open connections all the time.
type load struct {
	mu       sync.Mutex
	answered int
	failed   []error
	more     chan struct{} // closed and replaced with every answer
	stop     func()
}

// perSecond is the number of connections that each client opens.
const perSecond = 200

func startLoad(ctx context.Context, ask ...func(context.Context) error) *load {
	l := &load{more: make(chan struct{})}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	l.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	for _, ask := range ask {
		running.Go(func() {
			tick := time.NewTicker(time.Second / perSecond)
			defer tick.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
					running.Go(func() { l.count(ask(context.Background())) })
				}
			}
		})
	}
	return l
}

func (l *load) count(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.failed = append(l.failed, err)
	} else {
		l.answered++
	}
	close(l.more)
	l.more = make(chan struct{})
}

// await waits for n more connections.
func (l *load) await(ctx context.Context, n int) error {
	l.mu.Lock()
	n += l.answered
	for l.answered < n && len(l.failed) == 0 {
		more := l.more
		l.mu.Unlock()
		select {
		case <-more:
		case <-ctx.Done():
			return ctx.Err()
		}
		l.mu.Lock()
	}
	defer l.mu.Unlock()
	return errors.Join(l.failed...)
}

// TestTakeOver: upstream serves, is killed, and the proxy takes over its rules. Then upstream takes
// over the proxy's. Meanwhile no connection fails or breaks, and no unused chain is left.
func TestTakeOver(t *testing.T) {
	for name, services := range map[string]int{"flat": 20, "tree": 150} {
		t.Run(name, func(t *testing.T) { takeOver(t, services) })
	}
}

func takeOver(t *testing.T, services int) {
	binary, tools := withUpstream(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	at := tools.at
	web, next, shell := at.Pod("web"), at.Pod("next"), at.Pod("shell")
	for _, pod := range []*lab.Pod{web, next} {
		if _, err := pod.ServeTCP(8080); err != nil {
			t.Fatal(err)
		}
	}
	objects := objectsOf(services)
	objects = append(objects, service(200, nodePort(31000), dualStack(200)), endpoints(200, web.Addr4.String()), endpoints(200, web.Addr6.String()))
	targets := []netip.AddrPort{
		netip.MustParseAddrPort("10.96.0.201:80"), netip.MustParseAddrPort("[fd00:10:96::c9]:80"),
		netip.AddrPortFrom(at.Addr4, 31000), netip.AddrPortFrom(at.Addr6, 31000),
	}
	p := startUpstream(t, binary, tools, objects)
	var asks []func(context.Context) error
	var conns []net.Conn
	for _, to := range targets {
		asks = append(asks, func(ctx context.Context) error {
			_, err := shell.Ask(ctx, "tcp", to)
			return err
		})
		c, err := shell.Dial(ctx, "tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	l := startLoad(ctx, asks...)
	defer l.stop()
	step := func(what string) {
		t.Helper()
		if err := l.await(ctx, perSecond/2); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		for _, c := range conns {
			if _, err := lab.AskConn(ctx, c); err != nil {
				t.Fatalf("%s: an established connection to %s: %v", what, c.RemoteAddr(), err)
			}
		}
	}
	var theirs, mine [proxier.Families]map[string][]string
	for f := range proxier.Families {
		theirs[f] = contents(t, tools, f)
	}
	step("upstream")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	n := &node{Node: iptablestest.NewNode(t, tools), t: t, at: at}
	policy := proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}}
	n.open(iptablestest.Facts, policy)
	n.tell(objects)
	n.MustSync()
	n.MustFullSync()
	step("ours")
	alone := newSimulatedNode(t, at)
	alone.open(iptablestest.Facts, policy)
	alone.tell(objects)
	alone.MustSync()
	for f := range proxier.Families {
		mine[f] = contents(t, tools, f)
		for _, at := range without(slices.Sorted(maps.Keys(mine[f])), slices.Collect(maps.Keys(contents(t, alone.Tools, f)))) {
			if at != "filter KUBE-FIREWALL" { // it may be kubelet's
				t.Errorf("%s: upstream's %s is left", f, at)
			}
		}
	}
	p = startUpstream(t, binary, tools, objects)
	step("upstream again")
	l.stop()
	if err := l.await(ctx, 0); err != nil {
		t.Error(err)
	}
	for f := range proxier.Families {
		for _, at := range without(slices.Collect(maps.Keys(contents(t, tools, f))), slices.Collect(maps.Keys(theirs[f]))) {
			// Upstream deletes only those filter chains that it writes itself. The others have no
			// rules, and no rule jumps to them.
			if shared := iptablestest.SharedChainOf(at); shared == nil || shared.Table == "nat" {
				t.Errorf("%s: the proxy's %s is left", f, at)
			}
		}
	}
	p.API.Delete(service(1))
	p.API.Put(endpoints(200, next.Addr4.String()))
	for name := ""; name != "next"; {
		reply, err := shell.Ask(ctx, "tcp", targets[0])
		if err != nil {
			t.Fatalf("a change by upstream: %v; its log:\n%s", err, p.Log())
		}
		name = reply.Server
		if ctx.Err() != nil {
			t.Fatalf("upstream does not change the rules; its log:\n%s", p.Log())
		}
	}
	t.Logf("%d connections", l.answered)
}
