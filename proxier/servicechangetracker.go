// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// LabelServiceProxyName on a Service hands it to another proxy.
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// UpdateService records the newest state of a Service and says whether there
// is work pending, for this or any other object.
func (t *ChangeTracker) UpdateService(service *v1.Service) bool {
	name := types.NamespacedName{Namespace: service.Namespace, Name: service.Name}
	parsed := parseService(name, service, t.report)

	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[name]
	if e == nil {
		if parsed == nil {
			return len(t.dirty) > 0
		}
		e = t.add(name)
	}
	if parsed.equal(e.service) {
		return len(t.dirty) > 0
	}
	e.service = parsed
	return t.mark(e)
}

// DeleteService records that a Service is gone.
func (t *ChangeTracker) DeleteService(name types.NamespacedName) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[name]
	if e == nil || e.service == nil {
		return len(t.dirty) > 0
	}
	e.service = nil
	return t.mark(e)
}

// parseService returns nil for a Service that no proxy serves. What the API
// would have rejected is reported and left out; the rest is served.
func parseService(name types.NamespacedName, service *v1.Service, report func(Problem)) *Service {
	if service.Spec.Type == v1.ServiceTypeExternalName || service.Spec.ClusterIP == v1.ClusterIPNone {
		return nil
	}
	if _, ok := service.Labels[LabelServiceProxyName]; ok {
		return nil
	}
	invalid := func(field, format string, args ...any) {
		report(Problem{Kind: "Service", Object: name, UID: service.UID, Field: field, Reason: ReasonInvalidObject, Message: fmt.Sprintf(format, args...)})
	}

	s := &Service{Name: name, UID: service.UID, Created: service.CreationTimestamp.Time}
	s.InternalLocal = service.Spec.InternalTrafficPolicy != nil && *service.Spec.InternalTrafficPolicy == v1.ServiceInternalTrafficPolicyLocal
	if service.Spec.SessionAffinity == v1.ServiceAffinityClientIP {
		s.Affinity = time.Duration(v1.DefaultClientIPServiceAffinitySeconds) * time.Second
		if c := service.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			seconds := *c.ClientIP.TimeoutSeconds
			if seconds <= 0 || seconds > 86400 {
				invalid("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is outside 1–86400; using %v", seconds, s.Affinity)
			} else {
				s.Affinity = time.Duration(seconds) * time.Second
			}
		}
	}

	clusterIP := func(field, text string) {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.Is4In6() || addr.Zone() != "" {
			invalid(field, "%q is not an IP address; it is not served", text)
			return
		}
		if f := familyOf(addr); !s.ClusterIPs[f].IsValid() {
			s.ClusterIPs[f] = addr
		} else {
			invalid(field, "%q is a second %s address; it is not served", text, f)
		}
	}
	if len(service.Spec.ClusterIPs) == 0 && service.Spec.ClusterIP != "" {
		clusterIP("spec.clusterIP", service.Spec.ClusterIP)
	}
	for i, text := range service.Spec.ClusterIPs {
		if len(service.Spec.ClusterIPs) > 2 {
			clusterIP(fmt.Sprintf("spec.clusterIPs[%d]", i), text)
		} else {
			clusterIP(clusterIPField[i], text)
		}
	}
	if !s.ClusterIPs[IPv4].IsValid() && !s.ClusterIPs[IPv6].IsValid() {
		return nil
	}

	if len(service.Spec.Ports) == 1 {
		s.Ports = s.onePort[:0]
	} else {
		s.Ports = make([]ServicePort, 0, len(service.Spec.Ports))
	}
	for i := range service.Spec.Ports {
		p := &service.Spec.Ports[i]
		protocol, err := ParseProtocol(p.Protocol)
		if err != nil {
			invalid(fmt.Sprintf("spec.ports[%d].protocol", i), "%v; the port is not served", err)
			continue
		}
		if p.Port < 1 || p.Port > 65535 {
			invalid(fmt.Sprintf("spec.ports[%d].port", i), "%d is outside 1–65535; the port is not served", p.Port)
			continue
		}
		s.Ports = append(s.Ports, ServicePort{Name: p.Name, Port: uint16(p.Port), Protocol: protocol})
	}
	return s
}

var clusterIPField = [2]string{"spec.clusterIPs[0]", "spec.clusterIPs[1]"}
