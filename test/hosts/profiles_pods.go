// SPDX-License-Identifier: Apache-2.0

package hosts

import (
	"strconv"

	"github.com/tandem-proxy/tandem/capabilities"
)

// podProfiles are hosts that differ in how pods are attached.
var podProfiles = []*Profile{
	{
		Name: "routed", Short: true,
		Like: "flannel host-gw, Calico without encapsulation: pods at veth pairs, routes to the pods of other nodes over the nodes' network",
	},
	{
		Name: "kindnet",
		Like: "kindnet, ip-masq-agent: pods at veth pairs, and masquerading of what they send out of the cluster",
		Node: Setup{Rules: `*nat
:MASQ-AGENT -
-A POSTROUTING -m addrtype ! --dst-type LOCAL -j MASQ-AGENT
-A MASQ-AGENT -d {cluster} -j RETURN
-A MASQ-AGENT -j MASQUERADE --random-fully
COMMIT
`},
	},
	{
		Name: "masquerade-to-pods",
		Like: "CNIs that masquerade what pods send to other nodes, from the 600 source ports that the proxy uses as well",
		Node: Setup{
			Sysctls: []string{"net.ipv4.ip_local_port_range=1024 64935"},
			Rules: `*nat
-A POSTROUTING -s {pods} -o eth0 -p tcp -j MASQUERADE --random-fully --to-ports 64936-65535
-A POSTROUTING -s {pods} -o eth0 -p udp -j MASQUERADE --random-fully --to-ports 64936-65535
COMMIT
`,
		},
		Crowd: 80,
		Needs: []capabilities.Feature{capabilities.ConntrackLookup}, // docs/limits.md
	},
	{
		Name:        "sidecar",
		Like:        "Istio and other meshes with a proxy in each pod, which takes connections by their ClusterIP",
		Pods:        sidecar,
		SidecarPort: 15001,
		Answers:     []Answer{{Cells: toSidecar, By: FromPod}},
		Lost:        []Exception{{Cells: toSidecar, Why: "sockets are connected to an endpoint, whose address the mesh's rules do not know"}},
	},
	{
		Name:        "sidecar-opted-out",
		Like:        "the same, and the pods' namespace has the label `tandem-proxy.dev/socket-lb: disabled`",
		Pods:        sidecar,
		SidecarPort: 15001,
		Answers:     []Answer{{Cells: toSidecar, By: FromPod}},
		OptedOut:    true,
	},
	{
		Name: "route-flap",
		Like: "routing daemons that take a route to another node away for a moment",
		Gap:  Setup{Each: "route replace unreachable {otherpods}\n"},
		Back: Setup{Each: "route del unreachable {otherpods}\nroute replace {otherpods} via {peer} dev eth0\n"},
	},
	{
		Name:       "bridge",
		Like:       "the CNI plugin bridge, flannel's pods: pods at a bridge, bridged packets pass iptables",
		Unattached: true,
		Node:       bridgeOfPods,
		Other:      bridgeOfPods,
		Pods:       atBridge("cni0", 1500),
	},
	{
		Name:         "macvlan",
		Like:         "the CNI plugin macvlan: pods are on the nodes' network, and their packets do not pass the node",
		Unattached:   true,
		PodAddresses: map[Family]string{IPv4: "172.18.10.%d", IPv6: "fd00:18::a:%d"},
		PodCIDRs:     "172.18.10.0/24,fd00:18::a:0/112",
		Pods:         onCard("macvlan mode bridge"),
		Neither:      notPastNode,
	},
	{
		Name: "ipvlan", Kinds: []string{"ipvlan"},
		Like:         "the CNI plugin ipvlan: pods share the card's hardware address, and their packets do not pass the node",
		Unattached:   true,
		PodAddresses: map[Family]string{IPv4: "172.18.10.%d", IPv6: "fd00:18::a:%d"},
		PodCIDRs:     "172.18.10.0/24,fd00:18::a:0/112",
		Pods:         onCard("ipvlan mode l2"),
		Neither:      notPastNode,
	},
	{
		Name: "alias-ranges",
		Like: "GKE and Azure alias ranges: the node's address is a /32, everything goes through the router",
		Fabric: Setup{
			Sysctls: []string{"net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.br0.send_redirects=0"},
		},
		Node:  aliasRanges,
		Other: aliasRanges,
		Pods:  routedAgain,
	},
	{
		Name:     "ipv6-only",
		Like:     "nodes without IPv4 addresses",
		Families: []Family{IPv6},
		Node:     Setup{IP: "address del {self4}/16 dev eth0\n"},
	},
}

var bridgeOfPods = Setup{
	IP:    "link add cni0 type bridge\nlink set cni0 up\n",
	Each:  "route del blackhole {pods}\naddress add {bridge}/{plen} dev cni0{nodad}\n",
	Late:  []string{"net.bridge.bridge-nf-call-iptables=1", "net.bridge.bridge-nf-call-ip6tables=1"},
	Rules: podMasquerade,
}

// atBridge connects pods to a bridge.
func atBridge(bridge string, mtu int) Attachment {
	return Attachment{
		Node: Setup{IP: "link add veth{index} mtu " + strconv.Itoa(mtu) + " type veth peer name eth0 netns {netns}\nlink set veth{index} master " + bridge + " up\n"},
		Pod: Setup{
			IP:   "link set eth0 mtu " + strconv.Itoa(mtu) + " up\n",
			Each: "address add {pod}/{plen} dev eth0{nodad}\nroute add default via {bridge}\n",
		},
	}
}

var aliasRanges = Setup{
	Each: `
address del {self}/{nodelen} dev eth0
address add {self}/{len} dev eth0{nodad}
route add {router} dev eth0 src {self}
route replace default via {router} dev eth0 src {self}
`,
}

// routedAgain restores the routes to pods, which the kernel deletes together with the node's
// address.
var routedAgain = Attachment{Node: Setup{Each: "route replace {pod} dev {link} src {self}\n"}}

// onCard connects pods to the node's card by a device of a kind.
func onCard(kind string) Attachment {
	return Attachment{
		Node: Setup{IP: "link add link eth0 name card{index} type " + kind + "\nlink set card{index} netns {netns} name eth0\n"},
		Pod: Setup{
			IP:   "link set eth0 up\n",
			Each: "address add {pod}/{nodelen} dev eth0{nodad}\nroute add default via {router}\n",
		},
	}
}

// notPastNode is what netfilter does not keep if packets of pods do not pass the node.
var notPastNode = []Exception{
	{Cells: Cell{Client: FromPod}, Why: "packets of the pods do not pass the node"},
	{Cells: Cell{Client: FromHost, Backend: Here}, Why: "a node cannot reach its own pods"},
	{Cells: Cell{Client: Outside, Backend: Here}, Why: "a node cannot reach its own pods"},
	{Cells: Cell{Backend: Both}, Why: "a node cannot reach its own pods"},
}

// sidecar has the requests of toSidecar redirected in the pod.
var sidecar = Attachment{Pod: Setup{Rules: `*nat
-A OUTPUT -d {cached} -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 15001
COMMIT
`}}

// toSidecar are the requests that the proxy in the pod takes.
var toSidecar = Cell{Client: FromPod, Frontend: ClusterIP, Network: "tcp", Backend: There, Policy: Cluster, Kind: Request}
