// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/test/lab"
)

// loadBalancer is the Service for clients outside the cluster.
const loadBalancer = `apiVersion: v1
kind: Service
metadata: {namespace: shop, name: web}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.10
  clusterIPs: ["10.96.0.10", "fd00:10:96::10"]
  externalTrafficPolicy: Cluster
  ports:
  - {name: t, port: 80, protocol: TCP, nodePort: 30080}
  - {name: u, port: 80, protocol: UDP, nodePort: 30080}
status:
  loadBalancer: {ingress: [{ip: 203.0.113.10}, {ip: "2001:db8:203:113::10"}]}
`

// outside are the targets of that Service through a node.
func outside(n *lab.Node) map[string]netip.AddrPort {
	ways := map[string]netip.AddrPort{}
	for _, protocol := range []string{"tcp", "udp"} {
		ways[protocol+"4 by node port"] = netip.AddrPortFrom(n.Addr4, 30080)
		ways[protocol+"6 by node port"] = netip.AddrPortFrom(n.Addr6, 30080)
		ways[protocol+"4 by load balancer IP"] = netip.MustParseAddrPort("203.0.113.10:80")
		ways[protocol+"6 by load balancer IP"] = netip.MustParseAddrPort("[2001:db8:203:113::10]:80")
	}
	return ways
}

// over returns the targets of a protocol.
func over(protocol string, ways map[string]netip.AddrPort) map[string]netip.AddrPort {
	some := maps.Clone(ways)
	maps.DeleteFunc(some, func(name string, _ netip.AddrPort) bool { return !strings.HasPrefix(name, protocol) })
	return some
}

// announce routes external and load-balancer addresses to the node.
func announce(t testing.TB, l *lab.Lab, n *lab.Node, ways map[string]netip.AddrPort) {
	t.Helper()
	for _, to := range ways {
		if lab.ExternalPrefix4.Contains(to.Addr()) || lab.ExternalPrefix6.Contains(to.Addr()) {
			if err := l.Announce(netip.PrefixFrom(to.Addr(), to.Addr().BitLen()), n); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestKillFromOutside is TestKill for a client outside the cluster. Programs on devices forward
// its packets to the node's own pod and to a pod of another node. In the end, --cleanup
// detaches those programs as well.
func TestKillFromOutside(t *testing.T) {
	l := lab.NewT(t)
	node, other := l.Node("node1"), l.Node("node2")
	here, there, client := serve(t, node.Pod("here")), serve(t, other.Pod("there")), l.Client("client")
	ways := outside(node)
	announce(t, l, node, ways)
	dir := t.TempDir()
	writeManifests(t, dir, loadBalancer, here, there)
	killAgain(t, 15, node, dir, client.Sandbox, ways, here, there)

	if on := devicesWithPrograms(t, node); !slices.Equal(on, []string{lab.Uplink}) {
		t.Errorf("before the cleanup there are programs on %v", on)
	}
	cleanup(t, node)
	if on := devicesWithPrograms(t, node); len(on) > 0 {
		t.Errorf("after the cleanup there are programs on %v", on)
	}
}

// devicesWithPrograms returns the devices of the node that have any programs attached.
func devicesWithPrograms(t testing.TB, n *lab.Node) (names []string) {
	t.Helper()
	err := n.Do(func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			programs := 0
			for _, d := range []tc.Direction{tc.Ingress, tc.Egress} {
				found, err := tc.Find(l.Attrs().Index, d, func(*ciliumebpf.Program) bool { return true })
				if err != nil {
					return err
				}
				tc.Close(found)
				programs += len(found)
			}
			if programs > 0 {
				names = append(names, l.Attrs().Name)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
