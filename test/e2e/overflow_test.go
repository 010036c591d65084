// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
)

// overflowing is the i-th of many Services that exceed the capacity of the maps.
func overflowing(i int) (manifest string, to netip.AddrPort) {
	to = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 1, byte(1 + i)}), 80)
	return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {namespace: shop, name: s%d}
spec:
  clusterIP: %s
  ports: [{port: 80, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: s%[1]d-ipv4, labels: {kubernetes.io/service-name: s%[1]d}}
addressType: IPv4
ports: [{port: %[3]d, protocol: TCP}]
endpoints:
`, i, to.Addr(), targetPort), to
}

// While a Service opts out of the fast path, rules serve it, and only it. No connection
// fails.
func TestServiceOptsOut(t *testing.T) {
	s := newStage(t)
	writeManifest(t, s.dir, "cidr.yaml", serviceCIDR)
	s.start("--ebpf-sync-period=1s")
	defer s.end()
	s.serves(t)
	w := lab.NewLoad(t)
	defer w.End()
	s.ask(w, gently)
	long := s.open()
	for range 2 {
		for _, optedOut := range []bool{true, false} {
			service, server := loadBalancer, `"name":"ebpf","carries":true`
			if optedOut {
				service, server = inRules(service), `"name":"iptables","carries":true`
			}
			writeManifests(t, s.dir, service, s.here, s.there)
			s.await(t, fmt.Sprintf("rules, opted out %v", optedOut), func() error { return holds(t, s.node, ":KUBE-SVC-", optedOut) })
			if _, body, err := s.node.Get(t.Context(), 10249, "/debug/explain?src=127.0.0.1&dst=10.96.0.10:80"); err != nil || !strings.Contains(body, server) {
				t.Errorf("opted out %v: explain does not say %s: %v %s", optedOut, server, err, body)
			}
			const says = `"carrier":"iptables","reason":"the Service opts out`
			if _, body, err := s.node.Get(t.Context(), 10249, "/debug/carriers"); err != nil || strings.Contains(body, says) != optedOut {
				t.Errorf("opted out %v: the datapaths are %s, error %v", optedOut, body, err)
			}
			w.More(100)
			checkAll(t, long)
		}
	}
	w.End()
	few(t, w)
}

// inRules makes a Service opt out.
func inRules(service string) string {
	annotated := fmt.Sprintf("name: web, annotations: {%s: %s}}", proxier.AnnotationFastPath, proxier.FastPathDisabled)
	return strings.Replace(service, "name: web}", annotated, 1)
}

// Sockets served by rules get another endpoint when theirs is removed, and are not closed.
func TestServiceInRulesLosesEndpoint(t *testing.T) {
	s := newStage(t, lab.Options{Pause: true}) // pods show in /proc
	writeManifests(t, s.dir, inRules(clusterIPs), s.here, s.there)
	s.start()
	defer s.end()
	ways := targets()
	delete(ways, "tcp4")
	delete(ways, "tcp6")
	flows := append(openFlows(t, s.client.Sandbox, ways, s.here, s.there), openFlows(t, s.node.Sandbox, ways, s.here, s.there)...)
	writeManifests(t, s.dir, inRules(clusterIPs), s.there)
	for _, f := range flows {
		s.await(t, fmt.Sprintf("another endpoint for %s", f.LocalAddr()), func() error {
			r, err := lab.AskConn(t.Context(), f)
			if err == nil && r.Server != s.there.Name {
				err = fmt.Errorf("%s answers", r.Server)
			}
			return err
		})
	}
	if log := s.Log.String(); strings.Contains(log, "Closed UDP sockets") {
		t.Error("sockets were closed")
	}
}

// Rules serve Services that exceed the capacity of the maps, until there is room again. No
// connection fails.
func TestOverflow(t *testing.T) {
	const services, room = 7, 4
	l := lab.NewT(t)
	node := l.Node("node1")
	pods, client := []*lab.Pod{serve(t, node.Pod("a")), serve(t, node.Pod("b"))}, node.Pod("client")
	dir := t.TempDir()
	var ways []netip.AddrPort
	write := func(i int, pods ...*lab.Pod) {
		manifest, _ := overflowing(i)
		for _, p := range pods {
			manifest += fmt.Sprintf("- {addresses: [%q], nodeName: %s}\n", p.Addr4, p.Node.Name)
		}
		writeManifest(t, dir, fmt.Sprintf("s%d.yaml", i), manifest)
	}
	remove := func(i int) {
		if err := os.Remove(filepath.Join(dir, fmt.Sprintf("s%d.yaml", i))); err != nil {
			t.Fatal(err)
		}
	}
	for i := range services {
		_, to := overflowing(i)
		ways = append(ways, to)
	}
	writeManifest(t, dir, "cidr.yaml", serviceCIDR)
	write(0, pods...)
	flags := []string{fmt.Sprintf("--ebpf-max-frontends=%d", room), "--ebpf-sync-period=1s"}
	p := start(t, node, dir, flags...)
	defer func() {
		_ = p.Close()
		cleanup(t, node)
	}()
	p.synced(t)

	use := func(i int) *lab.Load {
		w := lab.NewLoad(t)
		w.Use(client.Sandbox, map[string]netip.AddrPort{fmt.Sprintf("tcp to service %d", i): ways[i]}, lab.Pace{})
		return w
	}
	loads := map[int]*lab.Load{}
	defer func() {
		for _, w := range loads {
			w.End()
		}
	}()
	for i := range services {
		write(i, pods...)
		await(t, fmt.Sprintf("service %d", i), func() error {
			_, err := client.Ask(t.Context(), "tcp", ways[i])
			return err
		})
		if i < room {
			loads[i] = use(i)
		}
	}
	await(t, "rules for what does not fit", func() error {
		if n := strings.Count(rules(t, node), ":KUBE-SVC-"); n != services-room {
			return fmt.Errorf("there are rules for %d Services", n)
		}
		return nil
	})
	last := use(services - 1)
	loads[services-1] = last
	// Another process adopts this placement, and changes of other Services do not affect it.
	p.Terminate(t)
	p = start(t, node, dir, flags...)
	p.synced(t)
	for i := range 8 {
		write(0, pods[i%2])
		last.More(100)
	}
	// These moved to rules. They move back when others are deleted.
	for i := room; i < services-1; i++ {
		remove(i)
	}
	await(t, "one that is left in rules", func() error {
		if n := strings.Count(rules(t, node), ":KUBE-SVC-"); n != 1 {
			return fmt.Errorf("there are rules for %d Services", n)
		}
		return nil
	})
	// End the load on Services before they are deleted.
	loads[1].End()
	remove(1)
	await(t, "no rules any more", func() error { return holds(t, node, "KUBE-SERVICES", false) })
	last.More(100)
	var asked int64
	for _, w := range loads {
		w.End()
		asked += w.Asked.Load()
	}
	t.Logf("%d connections", asked)
}

// Two datapaths serve the ports of one Service: socket programs TCP, and rules SCTP, for which
// there are no socket hooks.
func TestMixed(t *testing.T) {
	if err := lab.SCTPAvailable(); err != nil {
		lab.SkipOrFailModule(t, err)
	}
	l := lab.NewT(t)
	n := l.Node("node1")
	web, client, far := serve(t, n.Pod("web")), n.Pod("client"), l.Client("client")
	if _, err := web.ServeSCTP(targetPort); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	writeManifest(t, dir, "cidr.yaml", serviceCIDR)
	writeManifest(t, dir, "web.yaml", fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {namespace: shop, name: web}
spec:
  type: NodePort
  clusterIP: %s
  ports: [{name: t, port: 80, protocol: TCP, nodePort: 30080}, {name: s, port: 80, protocol: SCTP, nodePort: 30081}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-ipv4, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: t, port: %d, protocol: TCP}, {name: s, port: %[2]d, protocol: SCTP}]
endpoints:
- {addresses: [%q], nodeName: node1}
`, vip4.Addr(), targetPort, web.Addr4))
	p := start(t, n, dir)
	defer func() {
		_ = p.Close()
		cleanup(t, n)
	}()
	p.synced(t)
	for _, way := range []struct {
		from    *lab.Sandbox
		network string
		to      netip.AddrPort
	}{
		{client.Sandbox, "tcp", vip4}, {client.Sandbox, "sctp", vip4}, {n.Sandbox, "tcp", vip4}, {n.Sandbox, "sctp", vip4},
		{far.Sandbox, "tcp", netip.AddrPortFrom(n.Addr4, 30080)}, {far.Sandbox, "sctp", netip.AddrPortFrom(n.Addr4, 30081)},
	} {
		p.await(t, fmt.Sprintf("%s to %s from %s", way.network, way.to, way.from.Name), func() error {
			_, err := way.from.Ask(t.Context(), way.network, way.to)
			return err
		})
	}
	all := rules(t, n)
	if strings.Contains(all, "shop/web:t") || !strings.Contains(all, "shop/web:s") {
		t.Errorf("the rules are\n%s", all)
	}
}
