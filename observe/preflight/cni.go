// SPDX-License-Identifier: Apache-2.0

package preflight

import "fmt"

// cni is a network plugin and its signs.
type cni struct {
	name   string
	signs  func(*Facts) string
	detail func(*Facts) (Severity, string, string)
}

// harmless are plugins that leave Services to a kube-proxy.
func harmless(means string) func(*Facts) (Severity, string, string) {
	return func(*Facts) (Severity, string, string) { return Info, means, "" }
}

const (
	noServices = "It leaves Services to kube-proxy. Its devices, routes and rules stay as they are."
	replaces   = "It balances Services itself, at sockets or on devices. Two of them would compete for every connection."
)

var knownCNIs = []cni{
	{"flannel", func(f *Facts) string {
		return signs(sign("device", f.device("flannel+")), sign("chain", f.chain("FLANNEL-+")), sign("table", f.table("flannel-+")))
	}, harmless(noServices)},
	{"Calico", func(f *Facts) string {
		return signs(sign("device", f.device("cali+", "veth")), sign("device", f.device("vxlan.calico")), sign("chain", f.chain("cali-+")), sign("table", f.table("calico")))
	}, calico},
	{"Cilium", func(f *Facts) string {
		return signs(sign("device", f.device("cilium_host")), sign("chain", f.chain("CILIUM_+")))
	}, cilium},
	{"Antrea", func(f *Facts) string {
		return signs(sign("device", f.device("antrea-gw0")), sign("chain", f.chain("ANTREA-+")))
	}, func(*Facts) (Severity, string, string) {
		return Remark, "AntreaProxy serves ClusterIPs of pods in Open vSwitch, so kube-proxy sees only connections of the host and of clients outside. With proxyAll it serves all.",
			"Leave proxyAll off (antreaProxy.proxyAll: false)."
	}},
	{"kube-router", func(f *Facts) string {
		return signs(sign("device", f.device("kube-bridge")), sign("device", f.device("kube-dummy-if")), sign("chain", f.chain("KUBE-ROUTER-+")))
	}, func(f *Facts) (Severity, string, string) {
		if f.device("kube-dummy-if") != "" {
			return Blocker, replaces, "Run kube-router with --run-service-proxy=false, and remove device kube-dummy-if and its virtual servers (kube-router --cleanup-config)."
		}
		return Info, noServices, ""
	}},
	{"OVN-Kubernetes", func(f *Facts) string { return sign("device", f.device("ovn-k8s-mp+")) }, func(*Facts) (Severity, string, string) {
		return Blocker, replaces, "Do not run a kube-proxy on this node."
	}},
	{"AWS VPC CNI", func(f *Facts) string {
		return signs(sign("chain", f.chain("AWS-SNAT-CHAIN-+")), sign("chain", f.chain("AWS-CONNMARK-CHAIN-+")))
	}, func(f *Facts) (Severity, string, string) {
		if len(f.Uplinks) < 2 || !f.Programmable {
			return Info, noServices, ""
		}
		return Remark, "With several network interfaces, replies have to leave by the interface by which the request came in. The CNI marks connections for that in netfilter (connmark), which packets of mode ebpf do not pass.",
			"Try a NodePort at an address of each interface, or limit programs to the primary one: --ebpf-devices=eth0."
	}},
	{"kindnet", func(f *Facts) string {
		return signs(sign("chain", f.chain("KIND-MASQ-AGENT")), sign("table", f.table("kindnet+")), sign("table", f.table("kind-+")))
	}, harmless(noServices)},
	{"Weave Net", func(f *Facts) string {
		return signs(sign("device", f.device("weave")), sign("chain", f.chain("WEAVE+")))
	}, harmless(noServices)},
	{"Azure CNI", func(f *Facts) string {
		return signs(sign("device", f.device("azure+")), sign("device", f.device("azv+", "veth")))
	}, harmless(noServices)},
}

func calico(f *Facts) (Severity, string, string) {
	on := sign("device", f.device("bpfin.cali"))
	if p, ok := f.program("cali_", true); ok {
		on = signs(on, "program "+p.Name)
	} else if p, ok := f.program("cali_", false); ok {
		on = signs(on, "program "+p.Name+" on "+p.Device)
	}
	if on != "" {
		return Blocker, "Its eBPF data plane runs (" + on + "). " + replaces, "Turn it off (linuxDataplane: Iptables or Nftables), or do not run a kube-proxy."
	}
	return Info, noServices, ""
}

func cilium(f *Facts) (Severity, string, string) {
	if p, ok := f.program("cil_sock4_connect", true); ok {
		return Blocker, fmt.Sprintf("Its kube-proxy replacement runs (program %s on cgroup %s). %s", p.Name, p.Cgroup, replaces),
			"Turn it off (kubeProxyReplacement: false, socketLB.enabled: false), or do not run a kube-proxy."
	}
	return Remark, "Its programs on devices of pods balance ClusterIPs before packets reach the host, unless kube-proxy has translated the connection at the socket.",
		"Check kubeProxyReplacement and bpf.masquerade in its ConfigMap, and try Services from a pod, from the host and from outside."
}

// cnis finds network plugins.
func cnis(f *Facts) (list []Finding) {
	for _, c := range knownCNIs {
		if by := c.signs(f); by != "" {
			severity, means, set := c.detail(f)
			list = append(list, Finding{severity, "cni", c.name + " (" + by + ")", means, set})
		}
	}
	return list
}
