// SPDX-License-Identifier: Apache-2.0

package hosts

import "github.com/tandem-proxy/tandem/capabilities"

// meshProfiles are hosts whose pods have more in their network namespaces than a process, or
// whose devices have programs of other projects.
var meshProfiles = []*Profile{
	{
		Name: "ambient",
		Like: "Istio ambient: rules in each pod redirect the TCP connections it makes to a proxy, which connects to where they were going, with a mark",
		ClientPod: Setup{Rules: `*nat
:ISTIO_OUTPUT -
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT -o lo -j ACCEPT
-A ISTIO_OUTPUT -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
`},
		SidecarPort: 15001, ForwardMark: 0x539,
	},
	{
		Name:  "virtual-machine",
		Like:  "KubeVirt with masquerade binding: a virtual machine in a pod, whose packets the pod masquerades; no socket of this kernel sends them. [The first one](ebpf.md#devices) is lost",
		Wires: []Wire{{"pod", "tap0", FromVM, "eth1"}},
		Clients: map[string]Client{FromVM: {Setup: Setup{
			IP: "link set eth0 down\nlink set eth1 up\naddress add 10.0.2.2/24 dev eth1\naddress add fd10:0:2::2/120 dev eth1 nodad\n" +
				"route replace default via 10.0.2.1\nroute replace ::/0 via fd10:0:2::1\n",
		}}},
		ClientPod: Setup{
			// With one source port, a connection of the pod and one of the machine may be mixed up: docs/limits.md.
			Sysctls: []string{"net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.ip_local_port_range=10000 32000"},
			IP:      "link set tap0 up\naddress add 10.0.2.1/24 dev tap0\naddress add fd10:0:2::1/120 dev tap0 nodad\n",
			NFT: `
table inet kubevirt {
	chain postrouting {
		type nat hook postrouting priority srcnat
		ip saddr 10.0.2.2 oifname eth0 masquerade
		ip6 saddr fd10:0:2::2 oifname eth0 masquerade
	}
}
`,
		},
	},
	{
		Name:    "chaining",
		Like:    "Cilium in chaining mode: programs on the node's card and the pods' devices let packets pass, past all programs after them, and mark those of pods",
		Foreign: true,
		Needs:   []capabilities.Feature{capabilities.TCX}, // that are attached by tcx, ahead of any filter of clsact
	},
	{
		Name:       "management-port",
		Like:       "OVN: a switch has the pods, which the node reaches by a port of its own; marked packets have a routing table",
		Unattached: true,
		Node:       managementPort,
		Other:      managementPort,
		Pods:       atBridge("br-int", 1400),
	},
}

var managementPort = Setup{
	IP: `
link add br-int mtu 1400 type bridge
link set br-int up
link add mp0 mtu 1400 type veth peer name mp0-port mtu 1400
link set mp0-port master br-int up
link set mp0 up
`,
	Each: `
route del blackhole {pods}
address add {bridge}/{plen} dev mp0{nodad}
rule add priority 30 fwmark 0x1745ec lookup 7
route add {cluster} dev mp0 table 7
rule add priority 5999 from {pods} lookup 8
route add {pods} dev mp0 table 8
route add default via {router} dev eth0 table 8
`,
}
