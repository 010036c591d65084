// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/attached"
	"github.com/tandem-proxy/tandem/kernel/hostfilter"
	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/nftables"
	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// rules is a table of iptables: "raw PREROUTING -j DROP; PREROUTING -j other", and chains alone.
func rules(table string, lines ...string) Rules {
	t := &xtables.Table{Name: table}
	for _, line := range lines {
		name, rule, _ := strings.Cut(line, " ")
		name, policy, _ := strings.Cut(name, "=")
		c := t.Chain(name)
		if c == nil {
			t.Chains = append(t.Chains, xtables.Chain{Name: name, Policy: policy})
			c = &t.Chains[len(t.Chains)-1]
		}
		if rule != "" {
			c.Rules = append(c.Rules, rule)
		}
	}
	return Rules{Variant: "nft", Family: "IPv4", Table: t}
}

func legacy(r Rules) Rules {
	r.Variant = "legacy"
	return r
}

func metrics(mode string, tandem bool) Server {
	return Server{Role: RoleMetrics, Address: netip.MustParseAddrPort("127.0.0.1:10249"), Listening: true, KubeProxy: true, Mode: mode, Tandem: tandem}
}

func other(mode string) Server {
	s := metrics(mode, false)
	s.Role = RoleOther
	return s
}

func devices(list ...string) (all []Device) {
	for _, text := range list {
		words := strings.Fields(text)
		d := Device{Name: words[0], Type: words[1]}
		for _, a := range words[2:] {
			d.Addrs = append(d.Addrs, netip.MustParseAddr(a))
		}
		all = append(all, d)
	}
	return all
}

func program(name, hook, on string) attached.Program {
	p := attached.Program{Name: name, ID: 7, Hook: hook, Device: on}
	if strings.HasPrefix(on, "/") {
		p.Cgroup, p.Device = on, ""
	}
	return p
}

func TestFindings(t *testing.T) {
	upstreamRules := rules("nat", "KUBE-SERVICES -j KUBE-SVC-A", "KUBE-SVC-A", "KUBE-NODEPORTS")
	for _, test := range []struct {
		name  string
		facts Facts
		want  []string // severity, subject and beginnings of what
	}{
		{"nothing", Facts{Devices: devices("lo device 127.0.0.1", "eth0 device 172.18.0.1")}, nil},
		{"upstream in mode iptables", Facts{Servers: []Server{metrics("iptables", false)}, Rules: []Rules{upstreamRules}}, []string{"info kube-proxy: another kube-proxy runs in mode iptables"}},
		{"upstream in mode nftables", Facts{Servers: []Server{metrics("nftables", false)}, Chains: []nftables.Chain{{Family: "ip", Table: "kube-proxy", Name: "services"}}}, []string{"info kube-proxy: another kube-proxy runs in mode nftables"}},
		{"upstream in mode ipvs", Facts{Servers: []Server{metrics("ipvs", false)}, Devices: devices("kube-ipvs0 dummy 10.96.0.1"), Rules: []Rules{upstreamRules}}, []string{"info kube-proxy: another kube-proxy runs in mode ipvs"}},
		{"upstream changed its mode", Facts{Servers: []Server{metrics("nftables", false)}, Rules: []Rules{upstreamRules}}, []string{"info kube-proxy: another", "info kube-proxy: kernel state of a kube-proxy in mode iptables (nft), which does not run now"}},
		{"rules, and no process", Facts{Rules: []Rules{upstreamRules}}, []string{"remark kube-proxy: kernel state of a kube-proxy in mode iptables (nft), and none answers"}},
		{"kubelet's chains alone", Facts{Rules: []Rules{rules("nat", "KUBE-KUBELET-CANARY", "KUBE-MARK-DROP")}}, nil},
		{"both variants", Facts{Servers: []Server{metrics("iptables", false)}, Rules: []Rules{upstreamRules, legacy(upstreamRules)}}, []string{"info kube-proxy: another", "remark kube-proxy: rules of a kube-proxy in both variants"}},
		{"Tandem", Facts{Servers: []Server{metrics("ebpf", true)}, Rules: []Rules{upstreamRules}, Programs: []attached.Program{program("tdm_connect4", "connect4", "/cg"), program("tdm_in", "tcx ingress", "eth0")}, Uplinks: []string{"eth0"}}, []string{"info tandem: 2 programs of Tandem", "info kube-proxy: Tandem runs in mode ebpf"}},
		{"upstream, to stay", Facts{Shared: true, Servers: []Server{other("iptables")}, Rules: []Rules{upstreamRules, legacy(upstreamRules)}}, []string{"info kube-proxy: another kube-proxy runs in mode iptables"}},
		{"none, where one is to stay", Facts{Shared: true, Servers: []Server{metrics("ebpf", true)}, Rules: []Rules{upstreamRules}}, []string{"info kube-proxy: Tandem runs in mode ebpf", "remark kube-proxy: no other kube-proxy answers"}},
		{"something else, where one is to stay", Facts{Shared: true, Servers: []Server{{Role: RoleOther, Listening: true}}}, []string{"remark kube-proxy: no other kube-proxy answers"}},
		{"virtual servers of others", Facts{VirtualServers: 3}, []string{"info ipvs: 3 virtual servers of IPVS"}},
		{"virtual servers of a kube-proxy", Facts{VirtualServers: 3, Devices: devices("kube-ipvs0 dummy 10.96.0.1"), Servers: []Server{metrics("ipvs", false)}}, []string{"info kube-proxy: another"}},
		{"another server", Facts{Servers: []Server{{Role: RoleHealth, Address: netip.MustParseAddrPort("127.0.0.1:10256"), Listening: true}}}, []string{"remark ports: 127.0.0.1:10256 is taken"}},

		{"flannel", Facts{Devices: devices("flannel.1 vxlan 10.244.1.0"), Rules: []Rules{rules("nat", "FLANNEL-POSTRTG")}}, []string{"info cni: flannel (device flannel.1, chain FLANNEL-POSTRTG of iptables (nft, table nat))"}},
		{"Calico", Facts{Devices: devices("cali1234 veth"), Rules: []Rules{rules("raw", "cali-PREROUTING -m rpfilter --validmark --invert -j DROP", "PREROUTING -j cali-PREROUTING")}}, []string{"info cni: Calico"}},
		{"Calico's eBPF", Facts{Devices: devices("cali1234 veth", "bpfin.cali veth")}, []string{"blocker cni: Calico"}},
		{"Calico's eBPF by its programs", Facts{Devices: devices("cali1234 veth"), Programs: []attached.Program{program("cali_ctlb_v4", "connect4", "/cg")}}, []string{"blocker cni: Calico"}},
		{"Cilium", Facts{Devices: devices("cilium_host veth"), Programs: []attached.Program{program("cil_from_netdev", "tcx ingress", "eth0")}, Uplinks: []string{"eth0"}}, []string{"remark cni: Cilium"}},
		{"Cilium without kube-proxy", Facts{Devices: devices("cilium_host veth"), Programs: []attached.Program{program("cil_sock4_connect", "connect4", "/cg")}}, []string{"blocker cni: Cilium"}},
		{"Antrea", Facts{Devices: devices("antrea-gw0 openvswitch")}, []string{"remark cni: Antrea"}},
		{"kube-router", Facts{Devices: devices("kube-bridge bridge")}, []string{"info cni: kube-router"}},
		{"kube-router's proxy", Facts{Devices: devices("kube-bridge bridge", "kube-dummy-if dummy 10.96.0.10"), ClusterIPs: dns}, []string{"blocker cni: kube-router"}},
		{"OVN-Kubernetes", Facts{Devices: devices("ovn-k8s-mp0 openvswitch")}, []string{"blocker cni: OVN-Kubernetes"}},
		{"AWS", Facts{Rules: []Rules{rules("nat", "AWS-SNAT-CHAIN-0")}, Uplinks: []string{"eth0"}}, []string{"info cni: AWS VPC CNI"}},
		{"AWS with two interfaces", Facts{Rules: []Rules{rules("nat", "AWS-SNAT-CHAIN-0")}, Uplinks: []string{"eth0", "eth1"}}, []string{"remark cni: AWS VPC CNI"}},
		{"kindnet", Facts{Rules: []Rules{rules("nat", "KIND-MASQ-AGENT")}}, []string{"info cni: kindnet"}},
		{"Weave Net", Facts{Devices: devices("weave bridge")}, []string{"info cni: Weave Net"}},
		{"Azure CNI", Facts{Devices: devices("azv123 veth")}, []string{"info cni: Azure CNI"}},

		{"NodeLocal DNSCache", Facts{Devices: devices("nodelocaldns dummy 169.254.20.10 10.96.0.10"), ClusterIPs: dns}, []string{"info node-local-dns: device nodelocaldns has 10.96.0.10, the ClusterIP of Service kube-system/kube-dns"}},
		{"NodeLocal DNSCache at its own address", Facts{Devices: devices("nodelocaldns dummy 169.254.20.10"), ClusterIPs: dns}, []string{"info node-local-dns: device nodelocaldns"}},
		{"IPVS has all ClusterIPs", Facts{Devices: devices("kube-ipvs0 dummy 10.96.0.10"), ClusterIPs: dns, Servers: []Server{metrics("ipvs", false)}}, []string{"info kube-proxy"}},
		{"Istio", Facts{Rules: []Rules{rules("nat", "ISTIO_POSTRT")}}, []string{"remark mesh: Istio in ambient mode"}},
		{"Linkerd", Facts{Rules: []Rules{rules("nat", "PROXY_INIT_OUTPUT")}}, []string{"remark mesh: Linkerd"}},

		{"firewalld", Facts{Firewalls: []hostfilter.Firewall{{Where: "chain filter_FORWARD in table inet firewalld of nf_tables"}}}, []string{"remark firewall: firewalld: chain filter_FORWARD in table inet firewalld"}},
		{"ufw", Facts{Rules: []Rules{rules("filter", "FORWARD=DROP", "ufw-before-forward")}, Firewalls: []hostfilter.Firewall{{Where: "chain FORWARD in table ip filter of nf_tables"}}}, []string{"remark firewall: ufw: chain FORWARD in table ip filter"}},
		{"a FORWARD policy", Facts{Firewalls: []hostfilter.Firewall{{Where: "chain FORWARD", Accepts: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}}}, []string{"remark firewall: chain FORWARD (accepts packets to [10.244.0.0/16])"}},

		{"a filter before DNAT", Facts{BeforeDNAT: []hostfilter.Rule{{Match: inet.Match{Protocol: inet.TCP}, Where: "rule 3 of chain c in table inet guard of nf_tables"}}},
			[]string{"remark policy: rule 3 of chain c in table inet guard of nf_tables filters TCP before DNAT"}},

		{"IPsec", Facts{XfrmPolicies: 3}, []string{"info encryption: IPsec: 3 policies"}},
		{"WireGuard", Facts{Devices: devices("wg0 wireguard"), Uplinks: []string{"eth0", "wg0"}}, []string{"info encryption: WireGuard: wg0"}},
		{"WireGuard that is unused", Facts{Devices: devices("wg0 wireguard"), Uplinks: []string{"eth0"}}, []string{"remark encryption: WireGuard: wg0"}},
		{"programs of others", Facts{Uplinks: []string{"eth0"}, Programs: []attached.Program{
			program("falco", "connect4", "/cg"), program("", "xdp", "eth0"), program("pod", "tcx ingress", "veth1"),
		}}, []string{"remark programs: programs of others on cgroups: falco (7, connect4 /cg)", "remark programs: programs of others on uplinks: unnamed (7, xdp eth0)"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.facts.Programmable = true
			got := Findings(&test.facts)
			texts := make([]string, len(got))
			for i, f := range got {
				texts[i] = f.Severity.String() + " " + f.Subject + ": " + f.What
				if f.Means == "" || f.Severity != Info && f.Set == "" {
					t.Errorf("%+v does not say what it means or what to do", f)
				}
			}
			if !slices.EqualFunc(texts, test.want, strings.HasPrefix) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(texts, "\n"), strings.Join(test.want, "\n"))
			}
		})
	}
}

var dns = map[netip.Addr]string{netip.MustParseAddr("10.96.0.10"): "kube-system/kube-dns"}

// TestOtherModes: what acts before or beside netfilter does not matter to rules.
func TestOtherModes(t *testing.T) {
	f := Facts{XfrmPolicies: 1, BeforeDNAT: []hostfilter.Rule{{Where: "a rule"}, {Where: "b"}}, Firewalls: []hostfilter.Firewall{{Where: "c"}}, Devices: devices("nodelocaldns dummy 10.96.0.10"), ClusterIPs: dns}
	if got := Findings(&f); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	if f.Programmable = true; len(Findings(&f)) < 5 || Worst(Findings(&f)) != Remark {
		t.Errorf("%+v", Findings(&f))
	}
}

func TestSeverityText(t *testing.T) {
	for _, s := range []Severity{Info, Remark, Blocker} {
		var again Severity
		text, err := s.MarshalText()
		if err == nil {
			err = again.UnmarshalText(text)
		}
		if err != nil || again != s {
			t.Errorf("%s: %v, %v", s, again, err)
		}
	}
	var s Severity
	if s.UnmarshalText([]byte("bad")) == nil {
		t.Error("no error")
	}
}
