// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// LabelServiceProxyName on a Service hands it to another proxy.
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// AnnotationFastPath on a Service opts out of the fast path with FastPathDisabled.
const (
	AnnotationFastPath = "tandem-proxy.dev/fast-path"
	FastPathDisabled   = "disabled"
)

// UpdateService records the newest state of a Service and reports whether there
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
	problem := func(field, message string) {
		report(Problem{Kind: "Service", Object: name, UID: service.UID, Field: field, Reason: ReasonInvalidObject, Message: message})
	}
	reported := 0
	invalid := func(field, format string, args ...any) {
		switch reported++; {
		case reported <= maxReported:
			problem(field, fmt.Sprintf(format, args...))
		case reported == maxReported+1:
			problem("spec", "further invalid fields are not listed")
		}
	}

	var zeros leadingZeros
	s := &Service{Name: name, UID: service.UID, Created: Seconds(service.CreationTimestamp.Unix())}
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

	if value, there := service.Annotations[AnnotationFastPath]; there {
		if s.OptedOut = value == FastPathDisabled; !s.OptedOut {
			invalid("metadata.annotations["+AnnotationFastPath+"]", "%.32q is not %q; it is ignored", value, FastPathDisabled)
		}
	}

	if len(service.Annotations) > 0 {
		s.Balancing = parseBalancing(service.Annotations, invalid)
		s.Forwarding = parseForwarding(service.Annotations, invalid)
		s.Kinds = parseType(service.Annotations, invalid)
		unknownAnnotations(service.Annotations, ServiceAnnotations, problem)
	}

	s.ExternalLocal = service.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal

	clusterIP := func(field, text string) {
		addr, nonStandard, err := parseVIP(text)
		if err != nil {
			invalid(field, "%v; it is not served", err)
			return
		}
		if nonStandard {
			zeros.add(text, addr, "%s", field)
		}
		if f := FamilyOf(addr); !s.ClusterIPs[f].IsValid() {
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
	seen := map[portName]struct{}(nil)
	if len(service.Spec.Ports) > 8 {
		seen = make(map[portName]struct{}, len(service.Spec.Ports))
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
		if s.hasPort(p.Name, protocol, seen) {
			invalid(fmt.Sprintf("spec.ports[%d].name", i), "a second %s port %q; it is not served", protocol, p.Name)
			continue
		}
		port := ServicePort{Name: p.Name, Port: uint16(p.Port), Protocol: protocol}
		if p.NodePort < 0 || p.NodePort > 65535 {
			invalid(fmt.Sprintf("spec.ports[%d].nodePort", i), "%d is outside 1–65535; there is no node port", p.NodePort)
		} else {
			port.NodePort = uint16(p.NodePort)
		}
		s.Ports = append(s.Ports, port)
	}
	if s.AtNodes = servedAtNodes(service); s.AtNodes {
		_, selected := service.Annotations[nodereport.AnnotationAddresses]
		s.AllAddresses = !selected
	}
	s.More = parseExtras(s, service, &zeros, invalid)
	if (s.Forwarding == DSR || s.Forwarding == Hybrid) && s.More != nil && s.More.selector != nil {
		invalid("metadata.annotations["+AnnotationForwarding+"]", "%s is not possible where a Service selects nodes, as others do not have its addresses; connections are masqueraded", s.Forwarding)
	}
	if message := zeros.message(); message != "" {
		invalid(zeros.field, "%s", message)
	}
	return s
}

// servedAtNodes reports whether ServiceLB serves a Service: by its class, or because its controller says so.
func servedAtNodes(s *v1.Service) bool {
	return s.Spec.Type == v1.ServiceTypeLoadBalancer && s.Spec.LoadBalancerClass != nil && *s.Spec.LoadBalancerClass == nodereport.Class ||
		slices.ContainsFunc(s.Status.Conditions, func(c metav1.Condition) bool { return c.Type == nodereport.ConditionAdvertised })
}

type portName struct {
	name     string
	protocol Protocol
}

// hasPort reports whether the Service has a port of that name already: names
// identify ports. For many ports, seen replaces the search.
func (s *Service) hasPort(name string, protocol Protocol, seen map[portName]struct{}) bool {
	if seen == nil {
		return slices.ContainsFunc(s.Ports, func(p ServicePort) bool { return p.Name == name && p.Protocol == protocol })
	}
	key := portName{name, protocol}
	_, has := seen[key]
	seen[key] = struct{}{}
	return has
}

// parseExtras returns nil for a Service that has none.
func parseExtras(s *Service, service *v1.Service, zeros *leadingZeros, invalid func(field, format string, args ...any)) *ServiceExtras {
	healthCheck := s.ExternalLocal && service.Spec.Type == v1.ServiceTypeLoadBalancer && service.Spec.HealthCheckNodePort != 0
	var selector labels.Selector
	if len(service.Annotations) > 0 {
		selector = parseNodeSelector(service.Annotations, invalid)
	}
	var probed []netip.Addr
	if s.AtNodes {
		probed = nodereport.Probed(service.Status.Conditions)
	}
	if len(service.Status.LoadBalancer.Ingress)+len(probed)+len(service.Spec.ExternalIPs)+len(service.Spec.LoadBalancerSourceRanges) == 0 && !healthCheck && selector == nil {
		return nil
	}
	x := &ServiceExtras{}
	if selector != nil {
		x.NodeSelector, x.selector = selector.String(), selector
	}
	room := max(0, maxFrontends/max(1, len(s.Ports)))
	add := func(to *[]netip.Addr, field string, i int, text string) {
		addr, nonStandard, err := parseVIP(text)
		switch {
		case err == nil && addr.IsLinkLocalUnicast():
			err = fmt.Errorf("%q is a link-local address", text)
		case err == nil && !s.ClusterIPs[FamilyOf(addr)].IsValid():
			err = fmt.Errorf("%q is an %s address, and the Service has no ClusterIP of that family", text, FamilyOf(addr))
		case err == nil && room == 0:
			err = fmt.Errorf("%d frontends are the most that one Service gets", maxFrontends)
		}
		if err != nil {
			invalid(fmt.Sprintf(field, i), "%v; it is not served", err)
			return
		}
		if nonStandard {
			zeros.add(text, addr, field, i)
		}
		room--
		*to = append(*to, addr)
	}
	for i := range service.Status.LoadBalancer.Ingress {
		in := &service.Status.LoadBalancer.Ingress[i]
		if s.AtNodes && in.IP == "127.0.0.1" {
			continue // stands for all nodes (servicelb --rootless)
		}
		if in.IP != "" && (in.IPMode == nil || *in.IPMode == v1.LoadBalancerIPModeVIP) {
			add(&x.LoadBalancerIPs, "status.loadBalancer.ingress[%d].ip", i, in.IP)
		}
	}
	for i, a := range probed {
		add(&x.LoadBalancerIPs, "status.conditions: probed address %d", i, a.String())
	}
	for i, text := range service.Spec.ExternalIPs {
		add(&x.ExternalIPs, "spec.externalIPs[%d]", i, text)
	}
	for _, list := range []*[]netip.Addr{&x.LoadBalancerIPs, &x.ExternalIPs} {
		slices.SortFunc(*list, netip.Addr.Compare)
		*list = slices.Compact(*list)
	}
	for i, text := range service.Spec.LoadBalancerSourceRanges {
		const field = "spec.loadBalancerSourceRanges[%d]"
		p, nonStandard, err := parseStoredCIDR(strings.TrimSpace(text))
		if err != nil {
			invalid(fmt.Sprintf(field, i), "%v; it matches no client", err)
			x.InvalidRanges = true
			continue
		}
		if nonStandard {
			zeros.add(text, p, field, i)
		}
		x.SourceRanges = append(x.SourceRanges, p)
	}
	slices.SortFunc(x.SourceRanges, comparePrefix)
	x.SourceRanges = slices.Compact(x.SourceRanges)
	x.RejectOthers = parseRangesAction(service.Annotations, invalid) && len(service.Spec.LoadBalancerSourceRanges) > 0
	if parseRangesPolicy(service.Annotations, invalid) && len(service.Spec.LoadBalancerSourceRanges) > 0 {
		x.denyRanges(invalid)
	}
	if healthCheck {
		if n := service.Spec.HealthCheckNodePort; n < 0 || n > 65535 {
			invalid("spec.healthCheckNodePort", "%d is outside 1–65535; there is no health check", n)
		} else {
			x.HealthCheckNodePort = uint16(n)
		}
	}
	return x
}

// maxAdmitted bounds the ranges that remain when some are denied: each may leave 32 or 128 of them.
const maxAdmitted = 1 << 14

// denyRanges replaces the source ranges by all others. What is not admitted is decided here, and tiers know
// admitted clients alone.
func (x *ServiceExtras) denyRanges(invalid func(field, format string, args ...any)) {
	denied := disjoint(x.SourceRanges)
	x.SourceRanges, x.InvalidRanges = nil, false // one that is no CIDR denies no client
	for family := range Families {
		whole := netip.PrefixFrom(unspecified[family], 0)
		before := len(x.SourceRanges)
		x.SourceRanges = appendOthers(x.SourceRanges, whole, denied)
		// Without a range, a family would be open.
		x.InvalidRanges = x.InvalidRanges || len(x.SourceRanges) == before
	}
	if len(x.SourceRanges) > maxAdmitted {
		invalid("spec.loadBalancerSourceRanges", "the %d denied ranges leave more than %d ranges of other clients; no client is admitted", len(denied), maxAdmitted)
		x.SourceRanges, x.InvalidRanges = nil, true
	}
}

// appendOthers appends the ranges within one that are in none of the sorted list, in order.
func appendOthers(out []netip.Prefix, within netip.Prefix, denied []netip.Prefix) []netip.Prefix {
	if len(out) > maxAdmitted {
		return out
	}
	if denied = overlapping(denied, within); len(denied) == 0 {
		return append(out, within)
	}
	// One that contains all of it is the first.
	if denied[0].Bits() <= within.Bits() {
		return out
	}
	low := netip.PrefixFrom(within.Addr(), within.Bits()+1)
	bytes := within.Addr().AsSlice()
	bytes[within.Bits()/8] |= 0x80 >> (within.Bits() % 8)
	addr, _ := netip.AddrFromSlice(bytes)
	high := netip.PrefixFrom(addr, within.Bits()+1)
	return appendOthers(appendOthers(out, low, denied), high, denied)
}

// overlapping is the part of a sorted list of disjoint ranges that overlaps one.
func overlapping(list []netip.Prefix, within netip.Prefix) []netip.Prefix {
	first, _ := slices.BinarySearchFunc(list, within, func(p, within netip.Prefix) int {
		if p.Overlaps(within) {
			return 0 // the first of them is searched
		}
		return comparePrefix(p, within)
	})
	last := first
	for last < len(list) && list[last].Overlaps(within) {
		last++
	}
	return list[first:last]
}

// disjoint drops the ranges of a sorted list that are within another.
func disjoint(list []netip.Prefix) (left []netip.Prefix) {
	for _, p := range list {
		if n := len(left); n == 0 || !left[n-1].Overlaps(p) {
			left = append(left, p)
		}
	}
	return left
}

// maxFrontends bounds addresses times ports of one Service: a megabyte of
// object must not become gigabytes of frontends.
const maxFrontends = 1 << 16

// parseVIP reads an address that packets from elsewhere can have as theirs.
func parseVIP(text string) (addr netip.Addr, zeros bool, err error) {
	addr, zeros, err = parseStoredAddr(text)
	if err != nil || addr.Is4In6() || addr.Zone() != "" {
		return netip.Addr{}, false, fmt.Errorf("%q is not an IP address", text)
	}
	if addr.IsUnspecified() || addr.IsLoopback() || addr.IsMulticast() {
		return netip.Addr{}, false, fmt.Errorf("%q is an unspecified, loopback or multicast address", text)
	}
	return addr, zeros, nil
}

var clusterIPField = [2]string{"spec.clusterIPs[0]", "spec.clusterIPs[1]"}
