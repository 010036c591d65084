// SPDX-License-Identifier: Apache-2.0

package hosts

// firewallProfiles are hosts with rules that expect what netfilter does to packets of Services.
var firewallProfiles = []*Profile{
	{
		Name: "firewalld", Short: true,
		Like: "firewalld with its default zone: everything else is rejected, unless it is established or has a translated destination; pods are trusted",
		Node: Setup{NFT: `
table inet firewalld {
	chain filter_PREROUTING {
		type filter hook prerouting priority filter + 10
		icmpv6 type { nd-router-advert, nd-neighbor-solicit } accept
		meta nfproto ipv6 fib saddr . mark . iif oif missing drop
	}
	chain filter_INPUT {
		type filter hook input priority filter + 10
		ct state { established, related } accept
		ct status dnat accept
		iifname lo accept
		ct state invalid drop
		jump zones
		meta l4proto { icmp, icmpv6 } accept
		tcp dport 22 accept
		reject with icmpx admin-prohibited
	}
	chain filter_FORWARD {
		type filter hook forward priority filter + 10
		ct state { established, related } accept
		ct status dnat accept
		iifname lo accept
		ct state invalid drop
		jump zones
		meta l4proto { icmp, icmpv6 } accept
		reject with icmpx admin-prohibited
	}
	chain filter_OUTPUT {
		type filter hook output priority filter + 10
		ct state { established, related } accept
		oifname lo accept
	}
	chain zones {
		ip saddr {cluster4} accept
		ip6 saddr {cluster6} accept
	}
}
`},
	},
	{
		Name: "forward-drop",
		Like: "ufw, Docker: the policy of FORWARD is DROP, and only what comes from pods, is established or has the proxy's mark passes",
		Node: Setup{Rules: ufw},
		Neither: []Exception{
			{Cells: Cell{Client: Outside, Backend: Here, Policy: Local}, Why: "the policy drops what is not masqueraded"},
		},
	},
	{
		Name: "pre-dnat-policy",
		Like: "Calico host endpoints with policy before DNAT: node ports are closed in tables raw and mangle",
		Node: Setup{Rules: `*raw
-A PREROUTING -i eth0 -p tcp -m multiport --dports 30180,30280 -j DROP
COMMIT
*mangle
-A PREROUTING -i eth0 -p udp -m multiport --dports 30180,30280 -j DROP
COMMIT
`},
		Denied: []Exception{
			{Cells: Cell{Client: Outside, Frontend: NodePort, Backend: Here, Policy: Cluster, Kind: Request}, Why: "the policy drops them"},
			{Cells: Cell{Client: Outside, Frontend: NodePort, Backend: There, Policy: Cluster, Kind: Request}, Why: "the policy drops them"},
		},
	},
	{
		Name: "drop-invalid",
		Like: "hosts that drop packets in state INVALID, before and after routing, as Calico does",
		Node: Setup{Rules: `*filter
-A INPUT -m conntrack --ctstate INVALID -j DROP
-A FORWARD -m conntrack --ctstate INVALID -j DROP
-A OUTPUT -m conntrack --ctstate INVALID -j DROP
COMMIT
`},
	},
	{
		Name: "calico-chains",
		Like: "Calico's own chains with a profile that lets everything pass: packets from and to each pod pass a chain of it, which drops what is invalid; what a route to the source does not confirm is dropped",
		Node: Setup{Rules: calicoChains}, Other: Setup{Rules: calicoChains},
		Pods: Attachment{Node: Setup{Rules: `*filter
:cali-fw-{index} -
:cali-tw-{index} -
-A cali-from-wl-dispatch -i {link} -g cali-fw-{index}
-A cali-to-wl-dispatch -o {link} -g cali-tw-{index}
-A cali-fw-{index} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-fw-{index} -m conntrack --ctstate INVALID -j DROP
-A cali-fw-{index} -j MARK --set-xmark 0x0/0x10000
-A cali-fw-{index} -p udp -m multiport --dports 4789 -j DROP
-A cali-fw-{index} -j cali-pri-kns
-A cali-fw-{index} -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-fw-{index} -j DROP
-A cali-tw-{index} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-tw-{index} -m conntrack --ctstate INVALID -j DROP
-A cali-tw-{index} -j MARK --set-xmark 0x0/0x10000
-A cali-tw-{index} -j cali-pri-kns
-A cali-tw-{index} -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-tw-{index} -j DROP
COMMIT
`}},
	},
	{
		Name: "node-local-dns",
		Like: "NodeLocal DNSCache: the address of a Service is on a device of the node, where a cache answers",
		Node: Setup{
			IP:   "link add nodelocaldns type bridge\nlink set nodelocaldns up\n",
			Each: "address add {cached}/{len} dev nodelocaldns{nodad}\n",
			Rules: `*raw
-A PREROUTING -d {cached} -p tcp -m tcp --dport 80:81 -j NOTRACK
-A PREROUTING -d {cached} -p udp -m udp --dport 80:81 -j NOTRACK
-A OUTPUT -s {cached} -p tcp -m tcp --sport 80:81 -j NOTRACK
-A OUTPUT -s {cached} -p udp -m udp --sport 80:81 -j NOTRACK
-A OUTPUT -d {cached} -p tcp -m tcp --dport 80:81 -j NOTRACK
-A OUTPUT -d {cached} -p udp -m udp --dport 80:81 -j NOTRACK
COMMIT
*filter
-A INPUT -d {cached} -p tcp -m tcp --dport 80:81 -j ACCEPT
-A INPUT -d {cached} -p udp -m udp --dport 80:81 -j ACCEPT
-A OUTPUT -s {cached} -p tcp -m tcp --sport 80:81 -j ACCEPT
-A OUTPUT -s {cached} -p udp -m udp --sport 80:81 -j ACCEPT
COMMIT
`,
		},
		NodeServes: true,
		Answers: []Answer{
			{Cells: Cell{Client: FromPod, Frontend: ClusterIP, Backend: There, Policy: Cluster, Kind: Request}, By: "node"},
			{Cells: Cell{Client: FromHost, Frontend: ClusterIP, Backend: There, Policy: Cluster, Kind: Request}, By: "node"},
		},
	},
}

// calicoChains are those that packets of all pods pass.
const calicoChains = `*raw
:cali-PREROUTING -
-A PREROUTING -j cali-PREROUTING
-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i pod+ -j MARK --set-xmark 0x40000/0x40000
-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP
-A cali-PREROUTING -m mark --mark 0x0/0x40000 -m mark --mark 0x10000/0x10000 -j ACCEPT
COMMIT
*mangle
:cali-PREROUTING -
:cali-POSTROUTING -
-A PREROUTING -j cali-PREROUTING
-A POSTROUTING -j cali-POSTROUTING
-A cali-PREROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-POSTROUTING -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-POSTROUTING -j MARK --set-xmark 0x0/0xf0000
COMMIT
*filter
:cali-INPUT -
:cali-FORWARD -
:cali-OUTPUT -
:cali-from-wl-dispatch -
:cali-to-wl-dispatch -
:cali-wl-to-host -
:cali-pri-kns -
-A INPUT -j cali-INPUT
-A FORWARD -j cali-FORWARD
-A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT
-A OUTPUT -j cali-OUTPUT
-A cali-INPUT -i pod+ -g cali-wl-to-host
-A cali-INPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-INPUT -j MARK --set-xmark 0x0/0xf0000
-A cali-wl-to-host -j cali-from-wl-dispatch
-A cali-wl-to-host -j ACCEPT
-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
-A cali-FORWARD -i pod+ -j cali-from-wl-dispatch
-A cali-FORWARD -o pod+ -j cali-to-wl-dispatch
-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-OUTPUT -o pod+ -j RETURN
-A cali-OUTPUT -j MARK --set-xmark 0x0/0xf0000
-A cali-pri-kns -j MARK --set-xmark 0x10000/0x10000
COMMIT
*nat
:cali-POSTROUTING -
-A POSTROUTING -j cali-POSTROUTING
-A cali-POSTROUTING -s {cluster} ! -d {cluster} -j MASQUERADE --random-fully
COMMIT
`

// ufw has the default policies of ufw: deny what comes in, and what is routed.
const ufw = `*filter
:FORWARD DROP
:INPUT DROP
:ufw-before-input -
:ufw-before-forward -
-A INPUT -j ufw-before-input
-A FORWARD -j ufw-before-forward
-A ufw-before-input -i lo -j ACCEPT
-A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-input -m conntrack --ctstate INVALID -j DROP
-A ufw-before-input -p {icmp} -j ACCEPT
-A ufw-before-input -s {cluster} -j ACCEPT
-A ufw-before-input -p tcp -m tcp --dport 22 -j ACCEPT
-A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-forward -p {icmp} -j ACCEPT
-A ufw-before-forward -s {pods} -j ACCEPT
COMMIT
`
