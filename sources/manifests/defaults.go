// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

// These functions set the API server's defaults on which a proxy relies. A manifest that kubectl
// accepts must mean the same here.

func defaultService(service *v1.Service) {
	spec := &service.Spec
	if spec.Type == "" {
		spec.Type = v1.ServiceTypeClusterIP
	}
	if spec.SessionAffinity == "" {
		spec.SessionAffinity = v1.ServiceAffinityNone
	}
	for i := range spec.Ports {
		if spec.Ports[i].Protocol == "" {
			spec.Ports[i].Protocol = v1.ProtocolTCP
		}
	}
	if spec.Type == v1.ServiceTypeExternalName {
		return
	}

	if spec.SessionAffinity == v1.ServiceAffinityClientIP {
		if spec.SessionAffinityConfig == nil {
			spec.SessionAffinityConfig = &v1.SessionAffinityConfig{}
		}
		if spec.SessionAffinityConfig.ClientIP == nil {
			spec.SessionAffinityConfig.ClientIP = &v1.ClientIPConfig{}
		}
		if client := spec.SessionAffinityConfig.ClientIP; client.TimeoutSeconds == nil {
			client.TimeoutSeconds = ptr.To(v1.DefaultClientIPServiceAffinitySeconds)
		}
	}
	if spec.InternalTrafficPolicy == nil {
		spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyCluster)
	}
	external := spec.Type == v1.ServiceTypeNodePort || spec.Type == v1.ServiceTypeLoadBalancer || len(spec.ExternalIPs) > 0
	if external && spec.ExternalTrafficPolicy == "" {
		spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
	}
	switch {
	case spec.ClusterIP == "" && len(spec.ClusterIPs) > 0:
		spec.ClusterIP = spec.ClusterIPs[0]
	case spec.ClusterIP != "" && len(spec.ClusterIPs) == 0:
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	if len(spec.IPFamilies) == 0 {
		for _, ip := range spec.ClusterIPs {
			// The change tracker reports invalid addresses.
			if addr, err := proxier.ParseAddr(ip); err == nil && addr.Is4() {
				spec.IPFamilies = append(spec.IPFamilies, v1.IPv4Protocol)
			} else if err == nil {
				spec.IPFamilies = append(spec.IPFamilies, v1.IPv6Protocol)
			}
		}
	}
	for i := range service.Status.LoadBalancer.Ingress {
		if ingress := &service.Status.LoadBalancer.Ingress[i]; ingress.IP != "" && ingress.IPMode == nil {
			ingress.IPMode = ptr.To(v1.LoadBalancerIPModeVIP)
		}
	}
}

func defaultEndpointSlice(slice *discoveryv1.EndpointSlice) {
	for i := range slice.Ports {
		port := &slice.Ports[i]
		if port.Name == nil {
			port.Name = ptr.To("")
		}
		if port.Protocol == nil {
			port.Protocol = ptr.To(v1.ProtocolTCP)
		}
	}
}

func defaultNode(node *v1.Node) {
	if spec := &node.Spec; spec.PodCIDR != "" && len(spec.PodCIDRs) == 0 {
		spec.PodCIDRs = []string{spec.PodCIDR}
	}
}
