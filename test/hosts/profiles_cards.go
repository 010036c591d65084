// SPDX-License-Identifier: Apache-2.0

package hosts

// cardProfiles are hosts with several network cards, and with unusual ones.
var cardProfiles = []*Profile{
	{
		Name:     "aws-vpc-cni",
		Like:     "AWS VPC CNI with pods on a secondary network interface, and network load balancers with instance targets: a connmark makes replies leave by the primary one",
		Families: []Family{IPv4},
		Wires:    []Wire{{"fabric", "secondary", "node", "eth1"}},
		Fabric: Setup{
			IP:   "link set secondary master br0 up\n",
			Each: "route replace {pods} via 172.18.1.1\n",
			// The fabric drops what the interface must not send.
			NFT: `
table bridge fabric {
	chain check {
		type filter hook prerouting priority 0
		iifname node1 ether type ip ip saddr != {self4} drop
		iifname secondary ether type ip ip saddr != { 172.18.1.1, {pods4} } drop
	}
}
`,
		},
		Node: Setup{
			Sysctls: []string{"net.ipv4.conf.all.arp_ignore=1", "net.ipv4.conf.eth0.rp_filter=2"},
			Each: `
link set eth1 up
address add 172.18.1.1/32 dev eth1
route add {router} dev eth1 table 2
route add default via {router} dev eth1 table 2
rule add priority 1024 fwmark 0x80/0x80 lookup main
`,
			Rules: awsRules,
		},
		Other: Setup{Each: "route replace {otherpods} via 172.18.1.1\n"},
		Pods: Attachment{Node: Setup{Each: `
rule add priority 512 to {pod} lookup main
rule add priority 1536 from {pod} lookup 2
`}},
		Neither: awsNeither,
	},
	{
		Name:     "aws-vpc-cni-primary",
		Like:     "the same with pods on the primary network interface",
		Families: []Family{IPv4},
		Fabric: Setup{NFT: `
table bridge fabric {
	chain check {
		type filter hook prerouting priority 0
		iifname node1 ether type ip ip saddr != { {self4}, {pods4} } drop
	}
}
`},
		Node: Setup{
			Sysctls: []string{"net.ipv4.conf.eth0.rp_filter=2"},
			Each:    "rule add priority 1024 fwmark 0x80/0x80 lookup main\n",
			Rules:   awsRules,
		},
		Pods:    Attachment{Node: Setup{Each: "rule add priority 512 to {pod} lookup main\n"}},
		Neither: awsNeither,
	},
	{
		Name:    "second-network",
		Like:    "a network card with clients but without a gateway, as with MetalLB on a network of its own",
		Wires:   []Wire{{"lan", "eth1", "node", "eth1"}},
		Node:    Setup{IP: "address add 192.168.77.1/24 dev eth1\naddress add fd00:77::1/64 dev eth1 nodad\nlink set eth1 up\n"},
		Clients: lanClients,
	},
	{
		Name:   "asymmetric",
		Like:   "nodes with two cards, where requests come in by one and the route back leads out of the other",
		Wires:  []Wire{{"fabric", "second", "node", "eth1"}},
		Fabric: twoNetworks,
		Node:   twoCards,
	},
	{
		Name:  "asymmetric-checked",
		Like:  "the same, and the network of the first card drops what comes from external and load balancer IPs",
		Wires: []Wire{{"fabric", "second", "node", "eth1"}},
		Fabric: Setup{IP: twoNetworks.IP, NFT: `
table inet fabric {
	chain check {
		type filter hook prerouting priority 0
		iifname second ip saddr {external4} drop
		iifname second ip6 saddr {external6} drop
	}
}
`},
		Node: twoCards,
	},
	{
		Name: "bridged-uplink",
		Like: "OVN, libvirt and hypervisors: the node's address is on a bridge, and the card is a port of it",
		Node: Setup{
			IP: "link add br-ex type bridge\nlink set br-ex up\nlink set eth0 master br-ex\n",
			Each: `
address del {self}/{nodelen} dev eth0
address add {self}/{nodelen} dev br-ex{nodad}
route replace default via {router} dev br-ex
route replace {otherpods} via {peer} dev br-ex
`,
		},
		Pods: routedAgain,
	},
	{
		Name: "bond", Kinds: []string{"bond"},
		Like: "cards in a bond",
		Node: Setup{
			IP: "link add bond0 type bond mode active-backup miimon 100\naddress flush dev eth0\nlink set eth0 down\n" +
				"link set eth0 master bond0\nlink set bond0 up\n",
			Each: `
address add {self}/{nodelen} dev bond0{nodad}
route replace default via {router} dev bond0
route replace {otherpods} via {peer} dev bond0
`,
		},
		Pods: routedAgain,
	},
	{
		Name: "vlan", Kinds: []string{"vlan"},
		Like: "the nodes' network is a VLAN of the card",
		Fabric: Setup{
			IP: "link set node1 nomaster\nlink set node1 up\nlink add link node1 name node1.5 type vlan id 5\nlink set node1.5 master br0 up\n",
		},
		Node: Setup{
			IP: "address flush dev eth0\nlink add link eth0 name eth0.5 type vlan id 5\nlink set eth0.5 up\n",
			Each: `
address add {self}/{nodelen} dev eth0.5{nodad}
route replace default via {router} dev eth0.5
route replace {otherpods} via {peer} dev eth0.5
`,
		},
		Pods: routedAgain,
	},
	{
		Name: "vrf", Kinds: []string{"vrf"},
		Like:  "a network card with clients in a routing domain (VRF) of its own, with routes to the pods and back",
		Wires: []Wire{{"lan", "eth1", "node", "eth1"}},
		Node: Setup{
			IP: "link add red type vrf table 10\nlink set red up\nlink set eth1 master red up\n" +
				"address add 192.168.77.1/24 dev eth1\naddress add fd00:77::1/64 dev eth1 nodad\n" +
				"route add 192.168.77.0/24 dev eth1\nroute add fd00:77::/64 dev eth1\n",
			Each: "route add {otherpods} via {peer} dev eth0 table 10\n",
		},
		Pods:    Attachment{Node: Setup{Each: "route add {pod} dev {link} table 10\n"}},
		Clients: lanClients,
	},
	{
		Name: "strict-source",
		Like: "rp_filter=1, as some distributions set it",
		Node: Setup{Sysctls: []string{"net.ipv4.conf.all.rp_filter=1", "net.ipv4.conf.default.rp_filter=1", "net.ipv4.conf.eth0.rp_filter=1"}},
	},
}

// awsRules have replies to requests to the node's address leave by the primary interface, and masquerade what leaves the network.
const awsRules = `*mangle
-A PREROUTING -i eth0 -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-xmark 0x80/0x80
-A PREROUTING -i pod+ -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
COMMIT
*nat
:AWS-CONNMARK-CHAIN-0 -
:AWS-SNAT-CHAIN-0 -
-A PREROUTING -i pod+ -j AWS-CONNMARK-CHAIN-0
-A PREROUTING -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
-A AWS-CONNMARK-CHAIN-0 -d 172.18.0.0/16 -j RETURN
-A AWS-CONNMARK-CHAIN-0 -d {cluster} -j RETURN
-A AWS-CONNMARK-CHAIN-0 -j CONNMARK --set-xmark 0x80/0x80
-A POSTROUTING -j AWS-SNAT-CHAIN-0
-A AWS-SNAT-CHAIN-0 -d 172.18.0.0/16 -j RETURN
-A AWS-SNAT-CHAIN-0 -d {cluster} -j RETURN
-A AWS-SNAT-CHAIN-0 ! -o vlan+ -m addrtype ! --dst-type LOCAL -j SNAT --to-source {self} --random-fully
COMMIT
`

var awsNeither = []Exception{
	{Cells: Cell{Client: Outside, Frontend: ExternalIP}, Why: "the network drops replies from addresses that are not the interface's"},
	{Cells: Cell{Client: Outside, Frontend: LoadBalancer}, Why: "the network drops replies from addresses that are not the interface's"},
}

// lanClients is a client at the node's second card.
var lanClients = map[string]Client{"lan": {
	Setup: Setup{
		IP: "address add 192.168.77.2/24 dev eth1\naddress add fd00:77::2/64 dev eth1 nodad\nlink set eth1 up\n" +
			"route add 203.0.113.0/24 via 192.168.77.1\nroute add 2001:db8:203:113::/64 via fd00:77::1\n",
	},
	NodePorts: map[Family]string{IPv4: "192.168.77.1", IPv6: "fd00:77::1"},
	Addresses: map[Family]string{IPv4: "192.168.77.2", IPv6: "fd00:77::2"},
}}

// twoNetworks delivers external and load balancer IPs by a second network.
var twoNetworks = Setup{
	IP: "address add 172.19.0.254/16 dev second\naddress add fd00:19::ffff/64 dev second nodad\nlink set second up\n" +
		"route replace 203.0.113.0/24 via 172.19.0.1\nroute replace 2001:db8:203:113::/64 via fd00:19::1\n",
}

// twoCards is a node whose second card has a default route that is not used.
var twoCards = Setup{
	Sysctls: []string{"net.ipv4.conf.all.rp_filter=2"},
	IP: "address add 172.19.0.1/16 dev eth1\naddress add fd00:19::1/64 dev eth1 nodad\nlink set eth1 up\n" +
		"route add default via 172.19.0.254 metric 200\nroute add ::/0 via fd00:19::ffff metric 2048\n",
}
