// SPDX-License-Identifier: Apache-2.0

package hosts

// overlayProfiles are hosts that reach the pods of some nodes through tunnels, and of others
// without, or through tunnels that few kernels have.
var overlayProfiles = []*Profile{
	{
		Name: "calico-ipip", Kinds: []string{"ipip"},
		Like:   "Calico with IPIP for other subnets and two families: the other node is behind a router; IPv6 has no tunnel",
		PodMTU: 1480,
		Fabric: withoutRedirects,
		Node:   calicoIPIP,
		Other:  calicoIPIP,
	},
	{
		Name: "calico-vxlan", Kinds: []string{"vxlan"},
		Like:   "Calico with VXLAN for other subnets and two families: the other node is behind a router; each family has a tunnel of its own",
		PodMTU: 1430,
		Fabric: withoutRedirects,
		Node:   calicoVXLAN,
		Other:  calicoVXLAN,
	},
	{
		Name: "geneve", Kinds: []string{"geneve"},
		Like:   "Antrea, OVN: a Geneve tunnel to the other node, and masquerading of what pods send out of the cluster",
		PodMTU: 1430,
		Node:   geneve,
		Other:  geneve,
	},
	{
		Name: "wireguard", Kinds: []string{"wireguard"}, Tools: []string{"wg"},
		Like:   "flannel and Calico with the kernel's WireGuard",
		PodMTU: 1420,
		Node:   wireGuard("AAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAUE=", "zo060cy2M+x7cMF4FKXHbs0CloUFDTRHRboFhw5YfVk="),
		Other:  wireGuard("AAICAgICAgICAgICAgICAgICAgICAgICAgICAgICAkI=", "pOCSkrZRwni5dyxWn1+puxPZBrRqtoyd+dwrRAn4ogk="),
	},
}

// withoutRedirects does not tell the nodes that there is a shorter way.
var withoutRedirects = Setup{Sysctls: []string{"net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.br0.send_redirects=0"}}

// calicoIPIP has a device of its own: the kernel's tunl0 exists already where IPIP was used before.
var calicoIPIP = Setup{
	IP: "link add cali-tunl type ipip local {self4} ttl 64\nlink set cali-tunl mtu 1480 up\naddress add {net4}/32 dev cali-tunl\n" +
		"route add {peer4}/32 via {router4} dev eth0\nroute replace {otherpods4} via {peer4} dev cali-tunl onlink\n",
	Rules:  calicoMasquerade,
	Rules4: fromTunnel("cali-tunl"),
}

var calicoVXLAN = Setup{
	IP: `
link add vxlan.calico address {mac}:00:00:00:ca:04 type vxlan id 4096 dstport 4789 local {self4} remote {peer4} nolearning dev eth0
link set vxlan.calico mtu 1450 up
link add vxlan-v6.calico address {mac}:00:00:00:ca:06 type vxlan id 4097 dstport 4789 local {self6} remote {peer6} nolearning dev eth0
link set vxlan-v6.calico mtu 1430 up
address add {net4}/32 dev vxlan.calico
address add {net6}/128 dev vxlan-v6.calico nodad
route add {peer4}/32 via {router4} dev eth0
route add {peer6}/128 via {router6} dev eth0
route replace {otherpods4} via {othernet4} dev vxlan.calico onlink
route del {otherpods6}
route add {otherpods6} via {othernet6} dev vxlan-v6.calico onlink
`,
	Rules:  calicoMasquerade,
	Rules4: fromTunnel("vxlan.calico"),
}

// calicoMasquerade is what Calico does for pods that reach out of its pools.
const calicoMasquerade = `*nat
:cali-POSTROUTING -
:cali-nat-outgoing -
-A POSTROUTING -j cali-POSTROUTING
-A cali-POSTROUTING -j cali-nat-outgoing
-A cali-nat-outgoing -s {cluster} ! -d {cluster} -j MASQUERADE --random-fully
COMMIT
`

// fromTunnel gives what the node itself sends into a tunnel the tunnel's address.
func fromTunnel(device string) string {
	return `*nat
-A cali-POSTROUTING -o ` + device + ` -m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL -j MASQUERADE --random-fully
COMMIT
`
}

var geneve = Setup{
	IP:   "link add genev_sys address {mac}:00:00:00:9e:01 type geneve id 1 remote {peer4}\nlink set genev_sys mtu 1430 up\n",
	Each: vxlanRoutes("genev_sys"), Rules: podMasquerade,
}

// wireGuard is a node with these keys, its own private one and the other's public one.
func wireGuard(own, other string) Setup {
	return Setup{
		IP: "link add wg0 mtu 1420 type wireguard\nlink set wg0 up\n",
		Each: `
address add {net}/{len} dev wg0{nodad}
route replace {otherpods} dev wg0
`,
		Rules: podMasquerade,
		WireGuard: `[Interface]
PrivateKey = ` + own + `
ListenPort = 51820
[Peer]
PublicKey = ` + other + `
Endpoint = {peer4}:51820
AllowedIPs = {otherpods4}, {otherpods6}
`,
	}
}
