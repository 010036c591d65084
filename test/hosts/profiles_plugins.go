// SPDX-License-Identifier: Apache-2.0

package hosts

// pluginProfiles are hosts whose pods the reference CNI plugins attach.
var pluginProfiles = []*Profile{
	{
		Name:       "cni-bridge",
		Like:       "the reference plugins bridge, host-local, portmap, firewall and bandwidth",
		Unattached: true,
		Node:       withoutPods, Other: withoutPods,
		Pods: Attachment{CNI: `[
			{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true, "mtu": 1500, ` + hostLocal + `},
			{"type": "portmap", "snat": true, "capabilities": {"portMappings": true}},
			{"type": "firewall", "backend": "iptables"},
			{"type": "bandwidth", "ingressRate": 4000000000, "ingressBurst": 80000000, "egressRate": 4000000000, "egressBurst": 80000000}
		]`},
	},
	{
		Name:       "cni-ptp",
		Like:       "the reference plugins ptp, host-local, portmap and firewall",
		Unattached: true,
		Node:       withoutPods, Other: withoutPods,
		Pods: Attachment{CNI: `[
			{"type": "ptp", "ipMasq": true, "mtu": 1500, ` + hostLocal + `},
			{"type": "portmap", "snat": true, "capabilities": {"portMappings": true}},
			{"type": "firewall", "backend": "iptables"}
		]`},
	},
	{
		Name:         "cni-macvlan",
		Like:         "the reference plugins macvlan and host-local",
		Unattached:   true,
		PodAddresses: map[Family]string{IPv4: "172.18.10.%d", IPv6: "fd00:18::a:%d"},
		PodCIDRs:     "172.18.10.0/24,fd00:18::a:0/112",
		Pods: Attachment{CNI: `[{"type": "macvlan", "master": "eth0", "mode": "bridge", "ipam": {
			"type": "host-local", "dataDir": "{state}/{pod4}",
			"ranges": [
				[{"subnet": "172.18.0.0/16", "rangeStart": "{pod4}", "rangeEnd": "{pod4}", "gateway": "{router4}"}],
				[{"subnet": "fd00:18::/64", "rangeStart": "{pod6}", "rangeEnd": "{pod6}", "gateway": "{router6}"}]
			],
			"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
		}}]`},
		Neither: notPastNode,
	},
}

const hostLocal = `"ipam": {
	"type": "host-local", "dataDir": "{state}/{nodename}",
	"ranges": [[{"subnet": "{pods4}"}], [{"subnet": "{pods6}"}]],
	"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
}`

// withoutPods lacks the lab's route to pods that do not exist.
var withoutPods = Setup{Each: "route del blackhole {pods}\n"}
