// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

// TestRepliesToMasqueradedClients: netfilter masquerades a client with a port that is a NodePort, as it may
// with any. The answer of a UDP server is no request to the NodePort. Other sockets of the pod reach the
// NodePort as before.
func TestRepliesToMasqueradedClients(t *testing.T) {
	e := newEdge(t, Options{})
	serve(t, e.here)
	serve(t, e.there)
	e.use(t, e.there) // which would get the answers
	client := e.at.Pod("client")
	rules := e.at.Command(t.Context(), "nft", "-f", "-")
	rules.Stdin = strings.NewReader(fmt.Sprintf(`table inet test { chain postrouting { type nat hook postrouting priority 100
		ip daddr %[1]s udp dport %[3]d snat ip to %[4]s:%[6]d
		ip6 daddr %[2]s udp dport %[3]d snat ip6 to [%[5]s]:%[6]d
	}
	}`, e.here.Addr4, e.here.Addr6, targetPort, e.at.Addr4, e.at.Addr6, nodePort))
	if out, err := rules.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	for _, addr := range []netip.Addr{e.here.Addr4, e.here.Addr6} {
		to := netip.AddrPortFrom(addr, targetPort)
		r, err := client.Ask(t.Context(), "udp", to)
		if err != nil || r.Server != e.here.Name || r.Peer != netip.AddrPortFrom(addrOf(e.at.Sandbox, addr), nodePort) {
			t.Errorf("%s, masqueraded: %v %v", to, r, err)
		}
		to = netip.AddrPortFrom(addrOf(e.at.Sandbox, addr), nodePort)
		if r, err := e.here.Ask(t.Context(), "udp", to); err != nil || r.Server != e.there.Name {
			t.Errorf("%s from the pod: %v %v", to, r, err)
		}
	}
}
