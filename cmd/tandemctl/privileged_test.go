// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// ctl runs the real tool on a node of the lab.
func ctl(at *lab.Node, args ...string) (code int, out, errs string) {
	var o, e bytes.Buffer
	code = newApp(&o, &e).run(append([]string{"--cgroup-root", at.CgroupPath()}, args...))
	return code, o.String(), e.String()
}

func mustCtl(t *testing.T, at *lab.Node, args ...string) string {
	t.Helper()
	code, out, errs := ctl(at, args...)
	if code != exitOK {
		t.Fatalf("tandemctl %s: exit code %d\n%s", strings.Join(args, " "), code, errs)
	}
	if !slices.Contains(args, "json") {
		t.Logf("tandemctl %s\n%s", strings.Join(args, " "), out)
	}
	return out
}

// TestOnNode follows an operator: nothing attached, a Service, its counters, an
// opt-out, and the end of the proxy.
func TestOnNode(t *testing.T) {
	kernel.NeedsPrograms(t)
	l := lab.NewT(t)
	one := l.Node("node1")
	web, client := one.Pod("web"), one.Pod("client")
	if _, err := web.ServeTCP(8080); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := ctl(one, "status"); code != exitError || !strings.Contains(errs, "Start kube-proxy") {
		t.Errorf("with nothing attached: exit code %d\n%s", code, errs)
	}

	tier, err := openTier(one)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := removal.Cleanup(t.Context(), one.CgroupPath()); err != nil {
			t.Error(err)
		}
	})
	closeTier := sync.OnceValue(tier.Close)
	t.Cleanup(func() { closeTier() })
	p, err := proxier.New(proxier.Options{NodeName: one.Name, Tier: tier, Runner: proxier.DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	p.OnServiceAdd(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: v1.ServiceSpec{
			ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			Ports: []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP}},
		},
	})
	p.OnEndpointSliceAdd(endpointSlice("shop", "web", web))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	if err := p.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}

	vip := netip.MustParseAddrPort("10.96.0.10:80")
	for range 5 {
		if _, err := client.Ask(t.Context(), "tcp", vip); err != nil {
			t.Fatal(err)
		}
	}
	var list serviceList
	if err := json.Unmarshal([]byte(mustCtl(t, one, "services", "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Services) != 1 || list.Services[0].Name != "web" || list.Services[0].Port != "http" || list.Services[0].Counters.Connections != 5 ||
		list.Services[0].Backends[0].Address != netip.AddrPortFrom(web.Addr4, 8080) || list.Services[0].Backends[0].Connections != 5 {
		t.Errorf("services: %+v", list)
	}
	if out := mustCtl(t, one, "services", "shop/web"); !strings.Contains(out, vip.String()) || !strings.Contains(out, web.Addr4.String()) {
		t.Errorf("services:\n%s", out)
	}
	c, err := client.Dial(t.Context(), "tcp", vip)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if out := mustCtl(t, one, "flows", "shop/web", "--client", client.Addr4.String()); !strings.Contains(out, c.LocalAddr().String()) || !strings.Contains(out, "established") {
		t.Errorf("flows:\n%s", out)
	}
	if out := mustCtl(t, one, "flows", "shop/other"); strings.Contains(out, "established") {
		t.Errorf("flows of another Service:\n%s", out)
	}
	if out := mustCtl(t, one, "status"); !strings.Contains(out, "Proxy:          running\n") || !strings.Contains(out, "tdm_connect6") {
		t.Errorf("status:\n%s", out)
	}

	mustCtl(t, one, "optout", "add", "--netns", client.NetNSPath())
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if r, err := client.Ask(ctx, "tcp", vip); err == nil {
		t.Errorf("a pod that opted out reached %s", r.Server)
	}
	var optOuts optOutList
	if err := json.Unmarshal([]byte(mustCtl(t, one, "optout", "list", "-o", "json")), &optOuts); err != nil || len(optOuts.OptOuts) != 1 {
		t.Fatalf("opt-outs: %+v, %v", optOuts, err)
	}
	mustCtl(t, one, "optout", "remove", "--cookie", fmt.Sprint(optOuts.OptOuts[0].Cookie))
	if _, err := client.Ask(t.Context(), "tcp", vip); err != nil {
		t.Error(err)
	}

	// The command line's own namespace is the test's, not a pod's.
	own := fmt.Sprint(os.Getpid())
	mustCtl(t, one, "optout", "add", "--pid", own)
	if out := mustCtl(t, one, "optout", "list", "-o", "json"); !strings.Contains(out, own) {
		t.Errorf("the list does not know process %s:\n%s", own, out)
	}
	if _, err := client.Ask(t.Context(), "tcp", vip); err != nil {
		t.Error(err)
	}

	// On the node, as the lock is of its network namespace.
	if err := one.Do(func() error {
		if code, _, errs := ctl(one, "detach"); code != exitError || !strings.Contains(errs, removal.ErrServing.Error()) {
			t.Errorf("detach beside the process: exit code %d\n%s", code, errs)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := closeTier(); err != nil {
		t.Fatal(err)
	}
	if out := mustCtl(t, one, "status"); !strings.Contains(out, "Proxy:          not running\n") {
		t.Errorf("status after the end of the proxy:\n%s", out)
	}
	if out := mustCtl(t, one, "services"); !strings.Contains(out, "shop/web") {
		t.Errorf("services after the end of the proxy:\n%s", out)
	}
}

func openTier(at *lab.Node) (tier *ebpf.Tier, err error) {
	err = at.Do(func() error {
		tier, err = ebpf.Open(context.Background(), ebpf.Options{
			CgroupRoot: at.CgroupPath(),
			Sizes:      lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 64, OptOuts: 64},
		})
		return err
	})
	return tier, err
}

func endpointSlice(namespace, service string, pod *lab.Pod) *discoveryv1.EndpointSlice {
	name, port, protocol := "http", int32(8080), v1.ProtocolTCP
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: service + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{pod.Addr4.String()}, NodeName: &pod.Node.Name}},
	}
}
