// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
)

// nodeLocalDNS finds caches that listen at a ClusterIP on a device of this node.
func nodeLocalDNS(f *Facts) (list []Finding) {
	for _, d := range f.Devices {
		if d.Name == "kube-ipvs0" || d.Name == "kube-dummy-if" {
			continue // addresses of Services, for IPVS
		}
		held := 0
		for _, a := range d.Addrs {
			name, isService := f.ClusterIPs[a]
			if !isService {
				continue
			}
			held++
			list = append(list, Finding{
				Info, "node-local-dns", fmt.Sprintf("device %s has %s, the ClusterIP of Service %s", d.Name, a, name),
				"A process on this node, such as NodeLocal DNSCache, answers at this address. Rules serve the ClusterIP, so that what other rules exempt from translation reaches that process.", "",
			})
		}
		if held == 0 && d.Name == "nodelocaldns" {
			list = append(list, Finding{
				Info, "node-local-dns", "device nodelocaldns has no ClusterIP that is known here",
				"Pods ask the cache at its link-local address, which no Service has.", "",
			})
		}
	}
	return list
}

// seesClusterIPs is how a mesh sees the ClusterIP that a pod dials.
const seesClusterIPs = "Give the mesh's namespaces the label " + proxier.KeySocketLB + "=" + proxier.SocketLBDisabled + ", so that packets of their pods are served on their devices; " +
	"or set ebpf.socketLB: host (--ebpf-socket-lb=host), so that rules serve the packets of all pods."

// meshes finds service meshes that redirect in the host's network namespace. Sidecars, whose rules
// are in the namespaces of pods, do not show here.
func meshes(f *Facts) (list []Finding) {
	if by := signs(sign("chain", f.chain("ISTIO_+")), sign("device", f.device("istioin")), sign("table", f.table("istio-+"))); by != "" {
		list = append(list, Finding{
			Remark, "mesh", "Istio in ambient mode (" + by + ")",
			"The mesh chooses endpoints by the ClusterIP that a pod dials. In mode ebpf, the socket of the pod is translated first, and the mesh sees an endpoint instead: routing by Service is skipped.",
			seesClusterIPs,
		})
	}
	if by := signs(sign("chain", f.chain("PROXY_INIT_+"))); by != "" {
		list = append(list, Finding{
			Remark, "mesh", "Linkerd (" + by + ")",
			"The mesh chooses endpoints by the ClusterIP that a pod dials. In mode ebpf, the socket of the pod is translated first.",
			seesClusterIPs,
		})
	}
	return list
}
