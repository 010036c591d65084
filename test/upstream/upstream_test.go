// SPDX-License-Identifier: Apache-2.0

//go:build linux

package upstream

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
)

var vip = netip.MustParseAddrPort("10.96.0.10:80")

func service() *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: v1.ServiceSpec{Type: v1.ServiceTypeNodePort, ClusterIP: vip.Addr().String(), ClusterIPs: []string{vip.Addr().String()},
			Ports: []v1.ServicePort{{Name: "p", Port: int32(vip.Port()), NodePort: 30080, Protocol: v1.ProtocolTCP}}},
	}
}

func slice(pod *lab.Pod) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "web", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{pod.Addr4.String()}, NodeName: &pod.Node.Name}},
	}
}

// TestStart: once Start returns a Service can be reached, from a pod and from
// outside, changes in the API are followed, and what is there stays when the process
// is gone.
func TestStart(t *testing.T) {
	binary := BinaryT(t)
	for _, mode := range []string{"iptables", "nftables"} {
		t.Run(mode, func(t *testing.T) {
			l := lab.NewT(t)
			n, client := l.Node("node1"), l.Client("client")
			shell, web, next := n.Pod("shell"), n.Pod("web"), n.Pod("next")
			for _, p := range []*lab.Pod{web, next} {
				if _, err := p.ServeTCP(8080); err != nil {
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			p, err := Start(ctx, n, Options{Binary: binary, Mode: mode, Objects: []fakeapi.Object{service(), slice(web)}, Args: Flags})
			if err != nil {
				t.Fatal(err)
			}
			reached := func(pod *lab.Pod) (all bool) {
				t.Helper()
				all = true
				for from, to := range map[*lab.Sandbox]netip.AddrPort{
					shell.Sandbox: vip, client.Sandbox: netip.AddrPortFrom(n.Addr4, 30080),
				} {
					reply, err := from.Ask(ctx, "tcp", to)
					if err != nil {
						t.Fatalf("%v; log of kube-proxy:\n%s", err, p.Log())
					}
					all = all && reply.Server == pod.Name
				}
				return all
			}
			if !reached(web) {
				t.Error("the Service does not lead to its endpoint")
			}
			p.API.Put(slice(next))
			for !reached(next) { // the test's deadline bounds this
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			if !reached(next) {
				t.Error("the Service does not lead to its endpoint when the process is gone")
			}
		})
	}
}

// TestStartFails: the error includes the log.
func TestStartFails(t *testing.T) {
	binary := BinaryT(t)
	n := lab.NewT(t).Node("node1")
	_, err := Start(context.Background(), n, Options{Binary: binary, Mode: "none"})
	if err == nil || !strings.Contains(err.Error(), "it has ended") || !strings.Contains(err.Error(), "must be iptables") {
		t.Errorf("error %v", err)
	}
	_, err = Start(context.Background(), n, Options{Binary: "/nowhere", Mode: "iptables"})
	if err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("error %v", err)
	}
}
