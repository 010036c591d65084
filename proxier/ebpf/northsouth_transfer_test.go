// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// TestTransfers: megabytes in both directions, and fragmented datagrams, arrive unchanged. This
// is tested with offloads, where super-packets without checksums cross the node, and with packets
// as on a real wire, on nodes whose netfilter drops packets of unknown connections.
func TestTransfers(t *testing.T) {
	for name, network := range map[string]lab.Options{
		"offload":  {},
		"on wires": {NoOffload: true, Nodes: live.Guarded},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEdge(t, Options{}, network)
			for _, backend := range []struct {
				name string
				at   *lab.Sandbox
			}{
				{"local pod", e.here.Sandbox},
				{"remote pod", e.there.Sandbox},
				{"local host network", e.at.Sandbox},
				{"remote host network", e.two.Sandbox},
			} {
				if _, err := backend.at.ServeBulk(targetPort); err != nil {
					t.Fatal(err)
				}
				if _, err := backend.at.ServeEcho(targetPort); err != nil {
					t.Fatal(err)
				}
				e.useAddrs(t, backend.at.Addr4, backend.at.Addr6)
				for _, n := range e.entries("tcp") {
					if err := e.client.Bulk(t.Context(), n.to, lab.BulkSize); err != nil {
						t.Errorf("%s to %s: %v", n, backend.name, err)
					}
				}
				for _, n := range e.entries("udp") {
					for _, size := range []int{100, 2_000, 8_000} {
						if err := e.client.Echo(t.Context(), n.to, size); err != nil {
							t.Errorf("%s to %s: %v", n, backend.name, err)
						}
					}
				}
			}
		})
	}
}

// useAddrs makes addresses of both families the endpoints.
func (e *edge) useAddrs(t testing.TB, addrs ...netip.Addr) {
	t.Helper()
	for _, s := range slicesOf("web") {
		for _, a := range addrs {
			if a.Is4() == (s.AddressType == discoveryv1.AddressTypeIPv4) {
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a.String()}})
			}
		}
		e.OnEndpointSliceUpdate(nil, s)
	}
	e.sync(t)
}
