// SPDX-License-Identifier: Apache-2.0

package hosts

// tunnelProfiles are hosts that reach the pods of other nodes, or clients, through tunnels.
var tunnelProfiles = []*Profile{
	{
		Name: "vxlan", Short: true, Kinds: []string{"vxlan"},
		Like:   "flannel vxlan, Calico VXLAN: an Ethernet tunnel, and masquerading of what pods send out of the cluster",
		PodMTU: 1450,
		Node:   vxlan,
		Other:  vxlan,
	},
	{
		Name:   "vxlan-jumbo",
		Like:   "cloud networks with an MTU of 9000, and pods with one of 1450",
		MTU:    9000,
		PodMTU: 1450,
		Node:   vxlan,
		Other:  vxlan,
	},
	{
		Name: "l3-tunnel-onlink", Short: true,
		Like:     "Calico IPIP: a tunnel without Ethernet header, with routes through the other node's address",
		Families: []Family{IPv4},
		PodMTU:   1420,
		Tunnels:  []Wire{{"node", "tunl0", "other", "tunl0"}},
		Node:     l3Tunnel("tunl0", "via {peer} dev tunl0 onlink"),
		Other:    l3Tunnel("tunl0", "via {peer} dev tunl0 onlink"),
	},
	{
		Name:    "l3-tunnel",
		Like:    "flannel and Calico WireGuard: a tunnel without Ethernet header, with routes without a next hop",
		PodMTU:  1420,
		Tunnels: []Wire{{"node", "wg0", "other", "wg0"}},
		Node:    l3Tunnel("wg0", "dev wg0"),
		Other:   l3Tunnel("wg0", "dev wg0"),
	},
	{
		Name: "ipip", Kinds: []string{"ipip"},
		Like:     "Calico IPIP: one device for all nodes, whose routes name the other end",
		Families: []Family{IPv4},
		PodMTU:   1480,
		Node:     tunnelOf("link add tunnel type ipip local {self4} ttl 64", "via {peer} dev tunnel onlink"),
		Other:    tunnelOf("link add tunnel type ipip local {self4} ttl 64", "via {peer} dev tunnel onlink"),
	},
	{
		Name: "gre", Kinds: []string{"gre"},
		Like:     "GRE between the nodes",
		Families: []Family{IPv4},
		PodMTU:   1476,
		Node:     tunnelOf("link add tunnel type gre local {self4} remote {peer4} ttl 64", "dev tunnel"),
		Other:    tunnelOf("link add tunnel type gre local {self4} remote {peer4} ttl 64", "dev tunnel"),
	},
	{
		Name: "sit", Kinds: []string{"sit"},
		Like:     "IPv6 pods over a network that has only IPv4",
		Families: []Family{IPv6},
		PodMTU:   1480,
		Node:     tunnelOf("link add tunnel type sit local {self4} remote {peer4} ttl 64", "dev tunnel"),
		Other:    tunnelOf("link add tunnel type sit local {self4} remote {peer4} ttl 64", "dev tunnel"),
	},
	{
		Name:       "kube-router",
		Like:       "kube-router: a tunnel without Ethernet header for each node, pods at a bridge, and a routing table for what pods send",
		PodMTU:     1420,
		Tunnels:    []Wire{{"node", "tun-peer", "other", "tun-peer"}},
		Node:       kubeRouter,
		Other:      kubeRouter,
		Unattached: true,
		Pods:       atBridge("kube-bridge", 1420),
	},
	{
		Name:    "vpn-clients",
		Like:    "clients that reach the node through a tunnel without Ethernet header, as with WireGuard between sites",
		Tunnels: []Wire{{"node", "wg0", "vpn", "wg0"}},
		Node: Setup{
			IP: "link set wg0 mtu 1420 up\naddress add 192.168.88.1/24 dev wg0\naddress add fd00:88::1/64 dev wg0 nodad\n",
		},
		Clients: map[string]Client{"vpn": {
			Setup: Setup{
				IP:   "link set wg0 mtu 1420 up\naddress add 192.168.88.2/24 dev wg0\naddress add fd00:88::2/64 dev wg0 nodad\n",
				Each: "route add {external} dev wg0\n",
			},
			NodePorts: map[Family]string{IPv4: "192.168.88.1", IPv6: "fd00:88::1"},
			Addresses: map[Family]string{IPv4: "192.168.88.2", IPv6: "fd00:88::2"},
		}},
	},
}

// vxlan is a node of flannel. The other node's address takes the place of the neighbours that
// flannel programs.
var vxlan = Setup{
	IP: `
link add flannel.1 address {mac}:00:00:00:f1:01 type vxlan id 1 dstport 8472 local {self4} remote {peer4} nolearning dev eth0
link set flannel.1 mtu 1450 up
`,
	Each:  vxlanRoutes("flannel.1"),
	Rules: podMasquerade,
}

// vxlanRoutes leads through an Ethernet tunnel to the pods of the other node.
func vxlanRoutes(device string) string {
	return `
address add {net}/{len} dev ` + device + `{nodad}
route del {otherpods}
route add {otherpods} via {othernet} dev ` + device + ` onlink
`
}

// podMasquerade is what flannel does for pods.
const podMasquerade = `*nat
:CNI-POSTRTG -
-A POSTROUTING -j CNI-POSTRTG
-A CNI-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN
-A CNI-POSTRTG -s {pods} -d {cluster} -j RETURN
-A CNI-POSTRTG -s {cluster} -d {pods} -j RETURN
-A CNI-POSTRTG ! -s {cluster} -d {pods} -j RETURN
-A CNI-POSTRTG -s {cluster} ! -d {multicast} -j MASQUERADE --random-fully
-A CNI-POSTRTG ! -s {cluster} -d {cluster} -j MASQUERADE --random-fully
COMMIT
*filter
:CNI-FWD -
-A FORWARD -j CNI-FWD
-A CNI-FWD -s {cluster} -j ACCEPT
-A CNI-FWD -d {cluster} -j ACCEPT
COMMIT
`

// l3Tunnel is a node with a tunnel, and a way to other nodes through it.
func l3Tunnel(device, way string) Setup {
	return Setup{
		IP: "link set " + device + " mtu 1420 up\n",
		Each: `
address add {net}/{len} dev ` + device + `{nodad}
route replace {otherpods} ` + way + "\n",
		Rules: podMasquerade,
	}
}

// tunnelOf is a node with a tunnel of a kind, and a way to other nodes through it.
func tunnelOf(link, way string) Setup {
	return Setup{
		IP: link + "\nlink set tunnel up\n",
		Each: `
address add {net}/{len} dev tunnel{nodad}
route replace {otherpods} ` + way + "\n",
		Rules: podMasquerade,
	}
}

var kubeRouter = Setup{
	IP: `
link add kube-bridge mtu 1420 type bridge
link set kube-bridge up
link set tun-peer mtu 1420 up
`,
	Each: `
route del blackhole {pods}
address add {bridge}/{plen} dev kube-bridge{nodad}
rule add from {pods} lookup 77
route add {otherpods} dev tun-peer table 77
route replace {otherpods} dev tun-peer src {bridge}
`,
}
