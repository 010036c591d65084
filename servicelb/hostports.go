// SPDX-License-Identifier: Apache-2.0

package servicelb

import (
	"cmp"
	"net/netip"

	v1 "k8s.io/api/core/v1"
)

// Labels of the DaemonSets and pods that K3s' controller makes, one DaemonSet for each Service.
const (
	LabelServiceName      = "svccontroller.k3s.cattle.io/svcname"
	LabelServiceNamespace = "svccontroller.k3s.cattle.io/svcnamespace"
)

// HostPort is a port of a node that leads to a pod.
type HostPort struct {
	Port     int32
	Protocol v1.Protocol
	// IP is the unspecified address of IPv4 for all addresses of both families.
	IP  netip.Addr
	Pod string // namespace/name
}

// HostPortsOf are the hostPorts of a pod that has its own network and is on a node, those of init containers and sidecars too. In the host's
// network, what listens counts. Pods of klipper-lb do not count: ServiceLB replaces them.
func HostPortsOf(p *v1.Pod) (list []HostPort) {
	if p.Spec.HostNetwork || p.Spec.NodeName == "" || p.Status.Phase == v1.PodSucceeded || p.Status.Phase == v1.PodFailed || p.Labels[LabelServiceName] != "" {
		return nil
	}
	for _, containers := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range containers {
			for _, port := range containers[i].Ports {
				if port.HostPort == 0 {
					continue
				}
				ip, err := netip.ParseAddr(port.HostIP)
				if err != nil || ip.IsUnspecified() {
					ip = netip.IPv4Unspecified()
				}
				list = append(list, HostPort{port.HostPort, cmp.Or(port.Protocol, v1.ProtocolTCP), ip.Unmap(), p.Namespace + "/" + p.Name})
			}
		}
	}
	return list
}

// has reports whether a claim's packets lead to the pod.
func (h *HostPort) has(c Claim) bool {
	return h.Port == c.Port && h.Protocol == c.Protocol && (h.IP == c.Addr || h.IP.IsUnspecified())
}
