// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
)

// startWith starts a process that watches an API.
func startWith(t testing.TB, n *lab.Node, api *fakeapi.API, flags ...string) *process {
	t.Helper()
	needs(t, flags)
	return begin(t, with(t, n, api, flags...))
}

// with is a command that reads Services from an API server.
func with(t testing.TB, n *lab.Node, api *fakeapi.API, flags ...string) *process {
	t.Helper()
	_, url, err := n.ServeHTTP(api)
	if err != nil {
		t.Fatal(err)
	}
	return command(n, append([]string{"--proxy-mode=ebpf", "--master=" + url, "--hostname-override=" + n.Name, "-v=3", "--oom-score-adj=0"}, flags...)...)
}

// nodePortService is a Service that depends on the facts of the node: which addresses serve its
// NodePort, and which endpoints are local.
func nodePortService(name, clusterIP string, nodePort int32) *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: "uid-of-it"},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeNodePort, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyCluster, InternalTrafficPolicy: ptr.To(v1.ServiceInternalTrafficPolicyCluster),
			Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP, NodePort: nodePort}},
		},
	}
}

// zoned are endpoints with topology hints for their own zones.
func zoned(service string, pods map[string]*lab.Pod) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: service + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(""), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolTCP)}},
	}
	for zone, p := range pods {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{p.Addr4.String()}, NodeName: &p.Node.Name, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)},
			Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}},
		})
	}
	return s
}

// The Node is created late and incomplete, changes, is deleted and created again. All of this
// takes effect while the process runs, and Services are served all the time.
func TestNodeFacts(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	here, there, client, far := serve(t, n.Pod("here")), serve(t, l.Node("node2").Pod("there")), n.Pod("client"), l.Client("far")
	vip, nodePort := netip.MustParseAddrPort("10.96.0.10:80"), uint16(30080)
	api := fakeapi.New(nodePortService("web", "10.96.0.10", 30080), zoned("web", map[string]*lab.Pod{"z1": here, "z2": there}))
	p := startWith(t, n, api, "--detect-local-mode=NodeCIDR", "--nodeport-addresses=primary", "--cluster-cidr=10.0.0.0/8")
	defer func() {
		_ = p.Close()
		cleanup(t, n)
	}()
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}

	// explains waits until the explanation of a client's connection contains these words.
	explains := func(what, source string, words ...string) {
		t.Helper()
		p.await(t, what, func() error {
			_, body, err := n.Get(t.Context(), 10249, fmt.Sprintf("/debug/explain?src=%s&dst=%s", source, vip))
			for _, w := range words {
				if err == nil && !strings.Contains(body, w) {
					err = fmt.Errorf("no %s in %s", w, body)
				}
			}
			return err
		})
	}
	// answers waits until a NodePort is served, or not, at an address.
	answers := func(what string, at netip.Addr, want bool) {
		t.Helper()
		p.await(t, what, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			if _, err := far.Ask(ctx, "tcp", netip.AddrPortFrom(at, nodePort)); (err == nil) != want {
				return fmt.Errorf("the NodePort at %s: %v", at, err)
			}
			return nil
		})
	}

	// No Node: Services are served nevertheless.
	p.synced(t)
	await(t, "without a Node", reaches(client.Sandbox, vip, there.Name))
	p.await(t, "what is not known", p.Says("Cannot find the address of this node"))
	explains("without a Node", client.Addr4.String(), `"kind":"outside"`)
	answers("without a Node", n.Addr4, false)

	// It is created without podCIDRs and zone, as with a slow cloud provider.
	w := lab.NewLoad(t)
	defer w.End()
	w.Use(client.Sandbox, map[string]netip.AddrPort{"tcp4": vip}, gently)
	node.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: n.Addr4.String()}}
	api.Put(node)
	answers("with an address", n.Addr4, true)
	w.More(20)
	node.Spec.PodCIDRs, node.Labels = []string{n.PodPrefix4.String()}, map[string]string{v1.LabelTopologyZone: "z1"}
	api.Put(node)
	explains("with podCIDRs and a zone", client.Addr4.String(), `"kind":"pod"`, `other-zone`)
	p.await(t, "the kernel in zone z1", onlyAnswers(client.Sandbox, vip, here.Name))

	// All of it changes.
	other := netip.MustParseAddr("203.0.113.77")
	if err := l.Announce(netip.PrefixFrom(other, 32), n); err != nil {
		t.Fatal(err)
	}
	link, err := n.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	address, err := netlink.ParseAddr(other.String() + "/32")
	if err == nil {
		err = n.Netlink().AddrAdd(link, address)
	}
	if err != nil {
		t.Fatal(err)
	}
	answers("at an address that is not the Node's", other, false)
	node.Status.Addresses[0].Address = other.String()
	api.Put(node)
	answers("at the Node's new address", other, true)
	answers("at its old one", n.Addr4, false)
	w.More(20)
	node.Labels[v1.LabelTopologyZone], node.Spec.PodCIDRs = "z2", []string{"10.99.0.0/24"}
	api.Put(node)
	explains("with other podCIDRs", client.Addr4.String(), `"kind":"outside"`)
	explains("with other podCIDRs", "10.99.0.7", `"kind":"pod"`)
	p.await(t, "the kernel in zone z2", onlyAnswers(client.Sandbox, vip, there.Name))

	// It is deleted: the last facts remain, and /healthz tells load balancers to use other nodes.
	api.Delete(node)
	p.await(t, "the Node's end", func() error {
		if code, body, err := n.Get(t.Context(), 10256, "/healthz"); err != nil || code != http.StatusServiceUnavailable || !strings.Contains(body, `"nodeEligible":false`) {
			return fmt.Errorf("/healthz answers %d %s, error %v", code, body, err)
		}
		return nil
	})
	if code, body, err := n.Get(t.Context(), 10256, "/livez"); err != nil || code != http.StatusOK {
		t.Errorf("/livez answers %d %s, error %v", code, body, err)
	}
	answers("without the Node", other, true)
	explains("without the Node", "10.99.0.7", `"kind":"pod"`)
	if err := p.Says("The Node object was deleted")(); err != nil {
		t.Error(err)
	}
	api.Put(node)
	p.await(t, "the Node again", healthy(n))
	w.More(20)
	w.End()
	few(t, w)
	if started := eventsOf(api, "Starting"); len(started) != 1 || started[0] != "Normal Node node1 StartKubeProxy " {
		t.Errorf("Events %q, want one", started)
	}
}

// onlyAnswers sends several requests.
func onlyAnswers(from *lab.Sandbox, to netip.AddrPort, pod string) func() error {
	return func() error {
		for range 20 {
			if err := reaches(from, to, pod)(); err != nil {
				return err
			}
		}
		return nil
	}
}

// eventsOf returns the Events with this reason.
func eventsOf(api *fakeapi.API, reason string) (list []string) {
	for _, e := range api.Events() {
		if e.Reason == reason {
			list = append(list, strings.Join([]string{e.Type, e.Regarding.Kind, e.Regarding.Name, e.Action, e.Note}, " "))
		}
	}
	return list
}
