// SPDX-License-Identifier: Apache-2.0

//go:build linux

package integration

import (
	"context"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// The cluster whose rules testdata/upstream.saved are, in the addresses of the lab. The
// node is the first; pods N are local if their third octet is 1.
var (
	nodeAddr = netip.MustParseAddr("172.18.0.1")
	lbAddr   = netip.MustParseAddr("203.0.113.10")
	localPod = netip.MustParseAddr("10.244.1.1") // endpoint of all Services that have any
	otherPod = netip.MustParseAddr("10.244.2.1") // likewise, on another node
	farPod   = netip.MustParseAddr("10.244.2.2") // likewise
)

// services of the cluster: by number they have 10.96.0.N, and NodePort 30000+N if any.
var services = []struct {
	name      string
	endpoints []netip.Addr
	change    func(*v1.ServiceSpec)
}{
	1: {"cluster", []netip.Addr{localPod, otherPod, farPod}, func(*v1.ServiceSpec) {}},
	2: {"local", []netip.Addr{localPod, otherPod, farPod}, func(s *v1.ServiceSpec) {
		s.Type, s.ExternalTrafficPolicy = v1.ServiceTypeNodePort, v1.ServiceExternalTrafficPolicyLocal
	}},
	3: {"ranges", []netip.Addr{localPod}, func(s *v1.ServiceSpec) {
		s.Type, s.LoadBalancerSourceRanges = v1.ServiceTypeLoadBalancer, []string{"198.51.100.0/24"}
	}},
	4: {"none", nil, func(s *v1.ServiceSpec) { s.Type = v1.ServiceTypeNodePort }},
	5: {"sticky", []netip.Addr{localPod, otherPod}, func(s *v1.ServiceSpec) {
		s.SessionAffinity = v1.ServiceAffinityClientIP
		s.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](10800)}}
	}},
	6: {"remote", []netip.Addr{otherPod}, func(s *v1.ServiceSpec) {
		s.Type, s.ExternalTrafficPolicy = v1.ServiceTypeNodePort, v1.ServiceExternalTrafficPolicyLocal
	}},
}

func clusterIP(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(n)}), 80)
}

func nodePort(n int) netip.AddrPort { return netip.AddrPortFrom(nodeAddr, uint16(30000+n)) }

func objects(thisNode string) (all []fakeapi.Object) {
	for n, s := range services {
		if n == 0 {
			continue
		}
		meta := metav1.ObjectMeta{Namespace: "shop", Name: s.name, Labels: map[string]string{discoveryv1.LabelServiceName: s.name}}
		service := &v1.Service{ObjectMeta: meta, Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeClusterIP, ClusterIP: clusterIP(n).Addr().String(), ClusterIPs: []string{clusterIP(n).Addr().String()},
			Ports: []v1.ServicePort{{Name: "p", Port: 80, NodePort: int32(nodePort(n).Port()), Protocol: v1.ProtocolTCP}},
		}}
		s.change(&service.Spec)
		switch service.Spec.Type {
		case v1.ServiceTypeClusterIP:
			service.Spec.Ports[0].NodePort = 0
		case v1.ServiceTypeLoadBalancer:
			service.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: lbAddr.String()}}
		}
		slice := &discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
			Ports: []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}}}
		for _, e := range s.endpoints {
			node := "other"
			if e == localPod {
				node = thisNode
			}
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{e.String()}, NodeName: &node})
		}
		all = append(all, service, slice)
	}
	return all
}

// TestUpstreamRules: the rules in testdata are those that upstream's kube-proxy writes.
func TestUpstreamRules(t *testing.T) {
	binary := upstream.BinaryT(t)
	n := lab.NewT(t).Node("node1")
	if n.Addr4 != nodeAddr {
		t.Fatalf("the node has %s", n.Addr4)
	}
	r := newTools(t, proxier.IPv4, "nft", n.Sandbox)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	p, err := upstream.Start(ctx, n, upstream.Options{Binary: binary, Mode: "iptables", Objects: objects(n.Name), Args: upstream.Flags})
	if err != nil {
		t.Fatal(err)
	}
	saved := r.save(t)
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if *update {
		if err := os.WriteFile("../testdata/upstream.saved", []byte(saved), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// Services come in any order.
	sorted := func(s string) []string { return slices.Sorted(strings.SplitSeq(s, "\n")) }
	if diff := cmp.Diff(sorted(read(t, "upstream.saved")), sorted(saved)); diff != "" {
		t.Errorf("upstream's rules (-want +got):\n%s", diff)
	}
}
