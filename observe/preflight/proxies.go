// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/xtables"
)

const ownPrefix = "tdm_"

// ownPrograms finds the programs of a Tandem that runs, or did.
func ownPrograms(f *Facts) []Finding {
	n := 0
	for _, p := range f.Programs {
		if strings.HasPrefix(p.Name, ownPrefix) {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return []Finding{{
		Info, "tandem", fmt.Sprintf("%d programs of Tandem are attached", n),
		"They serve Services now. A Tandem that starts adopts them, and another mode removes them once their connections have ended.", "",
	}}
}

// kubeProxies finds running kube-proxies by what answers at their ports.
func kubeProxies(f *Facts) (list []Finding) {
	for _, s := range f.Servers {
		switch {
		case s.Role == RoleHealth || !s.KubeProxy:
		case s.Tandem:
			list = append(list, Finding{
				Info, "kube-proxy", fmt.Sprintf("Tandem runs in mode %s (%s)", s.Mode, s.Address),
				"A Tandem that replaces it adopts what it programmed.", "",
			})
		case f.Shared:
			list = append(list, Finding{
				Info, "kube-proxy", fmt.Sprintf("another kube-proxy runs in mode %s (%s)", s.Mode, s.Address),
				"It serves what coexistence leaves to it, and its rules stay.", "",
			})
		default:
			list = append(list, Finding{
				Info, "kube-proxy", fmt.Sprintf("another kube-proxy runs in mode %s (%s)", s.Mode, s.Address),
				"Tandem takes over from it: its rules serve until Tandem serves every frontend, and established connections continue. Two that serve everything must not run at the same time.",
				"Replace it: change the image of its DaemonSet (docs/install.md). If it cannot be removed, share the traffic with it: --coexist.",
			})
		}
	}
	if f.Shared && !slices.ContainsFunc(f.Servers, func(s Server) bool { return s.Role != RoleHealth && s.KubeProxy && !s.Tandem }) {
		list = append(list, Finding{
			Remark, "kube-proxy", "no other kube-proxy answers on this node, and coexistence leaves traffic to one",
			"What is left to it is served by the rules that it left, which nothing updates, or not at all.",
			"Without another kube-proxy, do not set coexistence.",
		})
	}
	return list
}

// proxyState is what the modes of kube-proxy leave in the kernel.
func proxyState(f *Facts) (states []string) {
	add := func(state, sign string) {
		if sign != "" && !slices.Contains(states, state) {
			states = append(states, state)
		}
	}
	for _, t := range f.Rules {
		if t.Chain("KUBE-SERVICES") != nil && slices.ContainsFunc(t.Chains, func(c xtables.Chain) bool {
			return strings.HasPrefix(c.Name, "KUBE-SVC-") || c.Name == "KUBE-NODEPORTS"
		}) {
			add("iptables ("+t.Variant+")", t.Name)
		}
	}
	add("nftables", f.table("kube-proxy"))
	if f.device("kube-ipvs0") != "" {
		add("ipvs", "kube-ipvs0")
	}
	return states
}

// proxyLeftovers finds kernel state of modes that do not run.
func proxyLeftovers(f *Facts) (list []Finding) {
	if f.Shared {
		return nil // Tandem removes none of it
	}
	running := []string{}
	for _, s := range f.Servers {
		if s.Role != RoleHealth && s.KubeProxy {
			running = append(running, s.Mode)
		}
	}
	states := proxyState(f)
	both := slices.Contains(states, "iptables (nft)") && slices.Contains(states, "iptables (legacy)")
	for _, state := range states {
		mode, _, _ := strings.Cut(state, " ")
		if slices.Contains(running, mode) && !(both && mode == "iptables") || mode == "iptables" && slices.Contains(running, "ipvs") || slices.Contains(running, "ebpf") {
			continue
		}
		switch {
		case both && mode == "iptables":
			if state == "iptables (nft)" {
				list = append(list, Finding{
					Remark, "kube-proxy", "rules of a kube-proxy in both variants of iptables",
					"Both act on the same packets. Tandem removes and writes those of the variant that the node uses; those of the other variant stay, with endpoints that may be stale.",
					"Run kube-proxy --cleanup in a maintenance window, or flush the chains KUBE-* of the variant that kubelet does not use.",
				})
			}
		case len(running) == 0:
			list = append(list, Finding{
				Remark, "kube-proxy", "kernel state of a kube-proxy in mode " + state + ", and none answers at the port of metrics",
				"It listens on other ports, or these are leftovers of a removed kube-proxy. Tandem removes them when it serves everything. One that still runs would write them again.",
				"Make sure that no other kube-proxy runs on this node (k3s and RKE2 have one in their own process: --disable-kube-proxy).",
			})
		default:
			list = append(list, Finding{
				Info, "kube-proxy", "kernel state of a kube-proxy in mode " + state + ", which does not run now",
				"Tandem removes it when it serves everything.", "",
			})
		}
	}
	if f.VirtualServers > 0 && f.device("kube-ipvs0") == "" && f.device("kube-dummy-if") == "" {
		list = append(list, Finding{
			Info, "ipvs", fmt.Sprintf("%d virtual servers of IPVS, and no device kube-ipvs0", f.VirtualServers),
			"There are IPVS virtual servers that no kube-proxy made. Mode ipvs removes virtual servers that it did not make.",
			"For mode ipvs, list their addresses in ipvs.excludeCIDRs.",
		})
	}
	return list
}

// ports finds other processes at the ports of kube-proxy.
func ports(f *Facts) (list []Finding) {
	for _, s := range f.Servers {
		if s.Listening && !s.KubeProxy && s.Role != RoleOther {
			list = append(list, Finding{
				Remark, "ports", fmt.Sprintf("%s is taken by something that does not answer as a kube-proxy", s.Address),
				fmt.Sprintf("The server for %s cannot listen there. Services are served, but probes and load balancers that ask this port get wrong answers.", s.Role),
				fmt.Sprintf("End the process that listens there, or change %sBindAddress.", map[string]string{RoleHealth: "healthz", RoleMetrics: "metrics"}[s.Role]),
			})
		}
	}
	return list
}
