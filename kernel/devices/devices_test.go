// SPDX-License-Identifier: Apache-2.0

//go:build linux

package devices

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFind(t *testing.T) {
	// The node is 172.18.0.1 and fd00:18::1, its pods are 10.244.1.0/24, those of other
	// nodes 10.244.2.0/24 and up.
	nodeIPs := []netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("fd00:18::1")}
	const eth0 = `
		2 eth0 device
	`
	for _, test := range []struct {
		name string
		host
		want string // one Device a line
	}{
		{name: "nothing but lo"},
		{
			name: "flannel with vxlan",
			host: host{
				links: eth0 + `
					3 flannel.1 vxlan
					4 cni0 bridge
					5 vetha0 veth master cni0
					6 vetha1 veth master cni0
				`,
				addrs: `
					eth0 172.18.0.1/16
					flannel.1 10.244.1.0/32
					cni0 10.244.1.1/24
				`,
				routes: `
					default via 172.18.0.254 dev eth0
					172.18.0.0/16 dev eth0
					10.244.1.0/24 dev cni0
					10.244.2.0/24 via 10.244.2.0 dev flannel.1
					local 172.18.0.1/32 dev eth0 table 255
					fe80::/64 dev flannel.1
					fe80::/64 dev vetha0
					multicast ff00::/8 dev vetha0 table 255
				`,
			},
			want: `
				eth0 (2): node address 172.18.0.1
				flannel.1 (3): vxlan tunnel with routes
			`,
		},
		{
			name: "a tunnel without routes",
			host: host{
				links: eth0 + `
					3 flannel.1 vxlan
					4 tunl0 ipip down encap ipip
				`,
				addrs: `
					eth0 172.18.0.1/16
					flannel.1 10.244.1.0/32
				`,
				routes: `
					172.18.0.0/16 dev eth0
					fe80::/64 dev flannel.1
					local 10.244.1.0/32 dev flannel.1 table 255
					ff00::/8 dev flannel.1 table 255
				`,
			},
			want: "eth0 (2): node address 172.18.0.1",
		},
		{
			name: "calico with ipip",
			host: host{
				links: eth0 + `
					3 tunl0 ipip encap ipip
					4 cali0a veth
					5 cali0b veth
				`,
				addrs: `
					eth0 172.18.0.1/16
					tunl0 10.244.1.0/32
				`,
				routes: `
					default via 172.18.0.254 dev eth0
					172.18.0.0/16 dev eth0
					10.244.1.5/32 dev cali0a
					10.244.1.6/32 dev cali0b
					fd00:10:244:1::6/128 dev cali0b
					blackhole 10.244.1.0/24
					10.244.2.0/24 via 172.18.0.2 dev tunl0
				`,
			},
			want: `
				eth0 (2): node address 172.18.0.1
				tunl0 (3, no Ethernet): ipip tunnel with routes
			`,
		},
		{
			name: "wireguard with a table of its own",
			host: host{
				links: eth0 + `
					3 wireguard.cali wireguard encap none
					4 cali0a veth
				`,
				addrs: `
					eth0 172.18.0.1/16
					wireguard.cali 10.244.1.9/32
				`,
				routes: `
					default via 172.18.0.254 dev eth0
					10.244.1.5/32 dev cali0a
					10.244.2.0/24 dev wireguard.cali table 1
				`,
			},
			want: `
				eth0 (2): node address 172.18.0.1
				wireguard.cali (3, no Ethernet): wireguard tunnel with routes
			`,
		},
		{
			name: "host-gw over a second device",
			host: host{
				links: eth0 + `
					3 eth1 device
					4 eth2 device
					5 eth3 device
				`,
				addrs: `
					eth0 172.18.0.1/16
					eth1 192.168.1.1/24
					eth2 192.168.2.1/24
					eth3 192.168.3.1/24
				`,
				routes: `
					172.18.0.0/16 dev eth0
					192.168.1.0/24 dev eth1
					192.168.2.0/24 dev eth2
					192.168.3.0/24 dev eth3
					10.244.2.0/24 via 192.168.1.2 dev eth1
					fd00:10:244:2::/64 via fe80::2 dev eth2
				`,
			},
			want: `
				eth0 (2): node address 172.18.0.1
				eth1 (3): routes through a gateway
				eth2 (4): routes through a gateway
				eth3 (5): address 192.168.3.1/24
			`,
		},
		{
			name: "IPv4 by an IPv6 gateway",
			host: host{links: eth0, routes: "10.244.2.0/24 via fe80::2 dev eth0"},
			want: "eth0 (2): routes through a gateway",
		},
		{
			name: "kind",
			host: host{
				links: `
					2 veth3a veth
					3 veth3b veth
					9 eth0 veth
				`,
				// All pods have the same gateway address, on the node's end of the link.
				addrs: `
					veth3a 10.244.1.1/32
					veth3b 10.244.1.1/32
					eth0 172.18.0.1/16
					eth0 fd00:18::1/64
				`,
				routes: `
					default via 172.18.0.254 dev eth0
					default via fd00:18::ffff dev eth0
					172.18.0.0/16 dev eth0
					10.244.1.2/32 dev veth3a
					10.244.1.3/32 dev veth3b
					10.244.2.0/24 via 172.18.0.2 dev eth0
				`,
			},
			want: "eth0 (9): node address 172.18.0.1",
		},
		{
			name: "kind without a way out",
			host: host{
				links: "9 eth0 veth",
				addrs: "eth0 fd00:18::1/64",
				routes: `
					fd00:18::/64 dev eth0
					fd00:18::9/128 dev eth0
					unreachable default dev lo
				`,
			},
			want: "eth0 (9): node address fd00:18::1",
		},
		{
			name: "the node's address at the end of pods' links",
			host: host{
				links: eth0 + `
					3 pod1 veth
					4 pod2 netkit
					5 pod3 veth
				`,
				addrs: `
					pod1 172.18.0.1/32
					pod2 fd00:18::1/128
					pod3 172.18.0.1/32
					eth0 172.18.0.1/32
				`,
				routes: `
					10.244.1.5/32 dev pod1
					fd00:10:244:1::5/128 dev pod2
					default via 172.18.0.254 dev eth0
				`,
			},
			want: "eth0 (2): node address 172.18.0.1",
		},
		{
			name: "bond with VLANs",
			host: host{
				links: `
					4 bond0 bond
					2 eth0 device master bond0
					3 eth1 device master bond0
					5 bond0.100 vlan
					6 bond0.200 vlan
				`,
				addrs: "bond0.100 172.18.0.1/16",
				routes: `
					default via 172.18.0.254 dev bond0.100
					192.168.2.0/24 dev bond0.200
				`,
			},
			want: "bond0.100 (5): node address 172.18.0.1",
		},
		{
			name: "the address still on a port of the bridge",
			host: host{
				links: `
					4 br0 bridge
					3 bond0 bond master br0
					2 eth0 device master bond0
				`,
				addrs:  "eth0 172.18.0.1/16",
				routes: "default via 172.18.0.254 dev eth0",
			},
			want: "br0 (4): node address 172.18.0.1",
		},
		{
			name: "a VRF",
			host: host{
				links: `
					4 mgmt vrf
					2 eth0 device master mgmt
				`,
				addrs: `
					mgmt 172.18.0.1/32
					eth0 192.168.1.1/24
				`,
				routes: `
					default via 192.168.1.254 dev eth0 table 1001
					192.168.9.0/24 via 192.168.1.254 dev mgmt
				`,
			},
			want: "eth0 (2): default route",
		},
		{
			name: "two default routes",
			host: host{
				links: eth0 + `
					3 eth1 device
					4 ppp0 device encap ppp
				`,
				routes: `
					default via 172.18.0.254 dev eth0
					default via 192.168.1.254 dev eth1
					default dev ppp0
				`,
			},
			want: `
				eth0 (2): default route
				eth1 (3): default route
				ppp0 (4, no Ethernet): default route
			`,
		},
		{
			name: "multipath",
			host: host{
				links: eth0 + `
					3 eth1 device
					4 eth2 device
					5 eth3 device
				`,
				addrs: "lo 172.18.0.1/32",
				routes: `
					default nexthop via 192.168.0.254 dev eth0 nexthop via 192.168.1.254 dev eth1
					10.244.2.0/24 nexthop via 192.168.2.2 dev eth2 nexthop dev eth3
				`,
			},
			want: `
				eth0 (2): default route
				eth1 (3): default route
				eth2 (4): routes through a gateway
			`,
		},
		{
			name: "policy routing",
			host: host{
				links: eth0 + `
					3 eth1 device
					4 eth2 device
					5 eni5 veth
				`,
				addrs: "eth0 172.18.0.1/16",
				routes: `
					default via 172.18.0.254 dev eth0
					default via 172.18.0.254 dev eth1 table 2
					172.18.0.254/32 dev eth1 table 2
					10.9.0.0/16 via 172.18.0.253 dev eth2 table 3
					172.18.0.9/32 dev eni5
				`,
			},
			want: `
				eth0 (2): node address 172.18.0.1
				eth1 (3): default route
				eth2 (4): routes through a gateway
			`,
		},
		{
			name: "docker, and a node address on lo",
			host: host{
				links: eth0 + `
					3 docker0 bridge
					4 veth9 veth master docker0
					5 tap0 tuntap
					6 tun0 tuntap encap none
					7 dummy0 dummy
				`,
				addrs: `
					lo 172.18.0.1/32
					lo 127.0.0.1/8
					eth0 192.168.1.1/24
					docker0 172.17.0.1/16
				`,
				routes: `
					default via 192.168.1.254 dev eth0
					172.17.0.0/16 dev docker0
					192.168.9.0/24 dev tap0
					10.8.0.0/24 dev tun0
					192.168.8.0/24 dev dummy0
				`,
			},
			want: `
				eth0 (2): default route
				tun0 (6, no Ethernet): tuntap tunnel with routes
			`,
		},
		{
			name: "down, gone, or nowhere",
			host: host{
				links: `
					2 eth0 device down
					3 eth1 device
				`,
				addrs: `
					eth0 172.18.0.1/16
					eth9 172.18.0.1/16
				`,
				routes: `
					default via 192.168.1.254 dev eth9
					blackhole default dev eth1
					prohibit default dev eth1
					unreachable default dev eth1
				`,
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			links, addrs, routes := test.parse(t)
			got := text(Find(links, addrs, routes, append(nodeIPs, netip.Addr{}, netip.MustParseAddr("127.0.0.1"))))
			if diff := cmp.Diff(trim(test.want), got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func text(list []Device) []string {
	all := []string{}
	for _, d := range list {
		all = append(all, d.String())
	}
	return all
}

func trim(s string) []string {
	all := []string{}
	for _, words := range lines(s) {
		all = append(all, strings.Join(words, " "))
	}
	return all
}

func TestMembers(t *testing.T) {
	links, _, _ := host{links: `
		9 bond0 bond
		8 br0 bridge
		7 eth0 device
		6 eth1 device master bond0 active
		5 eth2 device master bond0 spare
		4 eth3 device master bond0 active
		3 eth4 device master eth0
		2 vetha veth master br0
		10 bond0.100 vlan
	`}.parse(t)
	list, _ := Named(links, []string{"bond0", "br0", "eth0", "eth1"})
	got := map[string][]int{}
	for _, d := range withOthers(list, links) {
		got[d.Name] = d.Members
	}
	// eth4 is the virtual function of eth0.
	if want := map[string][]int{"bond0": {4, 6}, "br0": nil, "eth0": {3}, "eth1": nil}; !cmp.Equal(got, want) {
		t.Error(cmp.Diff(want, got))
	}
}

func TestNamed(t *testing.T) {
	links, _, _ := host{links: `
		3 eth1 device
		2 eth0 device down
		4 bond0 bond
		5 bond1 bond master bond0
		6 wg+ wireguard encap none
	`}.parse(t)
	for _, test := range []struct {
		patterns  string
		want      string // names
		unmatched string
	}{
		{patterns: "eth0", want: "eth0"},
		{patterns: "eth+", want: "eth0 eth1"},
		{patterns: "eth", unmatched: "eth"},
		{patterns: "bond1 eth1 eth+ nowhere wlan+", want: "eth0 eth1 bond1", unmatched: "nowhere wlan+"},
		{patterns: "+", want: "eth0 eth1 bond0 bond1 wg+"},
		{patterns: "wg+", want: "wg+"},
		{patterns: "lo lo+", unmatched: "lo lo+"},
	} {
		t.Run(test.patterns, func(t *testing.T) {
			devices, unmatched := Named(links, strings.Fields(test.patterns))
			var names []string
			for _, d := range devices {
				names = append(names, d.Name)
				if d.L3 != (d.Name == "wg+") || !strings.HasPrefix(d.Why, "named by ") {
					t.Errorf("%s", d)
				}
			}
			if got := strings.Join(names, " "); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
			if got := strings.Join(unmatched, " "); got != test.unmatched {
				t.Errorf("unmatched %q, want %q", got, test.unmatched)
			}
		})
	}
}

func ExampleDevice_String() {
	fmt.Println(Device{Index: 7, Name: "tunl0", L3: true, Why: "ipip tunnel with routes"})
	// Output: tunl0 (7, no Ethernet): ipip tunnel with routes
}
