// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// LabelServiceProxyName marks a Service that another proxy serves.
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// poolLimit bounds the size of a pool. It exceeds the number of nodes of the largest clusters. A
// pool that reaches it is emptied, so later objects do not share values with older ones.
const poolLimit = 32768

// pool returns one pointer per distinct value, so that thousands of objects with "node-17" or
// "TCP" share one copy. Receivers must not write through the pointers.
type pool[T comparable] struct {
	mu     sync.Mutex
	values map[T]*T
}

func (p *pool[T]) ptr(value T) *T {
	p.mu.Lock()
	defer p.mu.Unlock()
	if shared, ok := p.values[value]; ok {
		return shared
	}
	if p.values == nil || len(p.values) >= poolLimit {
		p.values = make(map[T]*T)
	}
	shared := new(T)
	*shared = value
	p.values[value] = shared
	return shared
}

func (p *pool[T]) share(value *T) *T {
	if value == nil {
		return nil
	}
	return p.ptr(*value)
}

// hint has the usual EndpointHints: at most one zone and one node.
type hint struct {
	zone, node       string
	hasZone, hasNode bool
}

var (
	isTrue, isFalse = true, false
)

func sharedBool(b *bool) *bool {
	switch {
	case b == nil:
		return nil
	case *b:
		return &isTrue
	default:
		return &isFalse
	}
}

// trimmer drops the fields that a proxy does not read, before objects are cached. It must not
// change an object that it has trimmed already.
type trimmer struct {
	// start is the start of this process. Trigger times of earlier changes are dropped:
	// their latency is not measured, and the annotation takes a map per slice.
	start time.Time
	// serviceAnnotations are the keys kept on Services, sliceAnnotations those on EndpointSlices, beside the
	// time of the last change.
	serviceAnnotations, sliceAnnotations []string
	// podAnnotations and namespaceLabels are the keys kept on Pods and Namespaces.
	podAnnotations, namespaceLabels []string
	// hostPorts has Pods keep what hostPorts need, and addresses has Nodes keep their addresses and podCIDRs alone.
	hostPorts, addresses bool

	text       pool[string]
	protocols  pool[v1.Protocol]
	ports      pool[int32]
	policies   pool[v1.ServiceInternalTrafficPolicy]
	ipModes    pool[v1.LoadBalancerIPMode]
	timeouts   pool[int32]
	hintsMu    sync.Mutex
	hintsCache map[hint]*discoveryv1.EndpointHints
}

// transform is a cache.TransformFunc. It does not change tombstones and objects of other types.
func (t *trimmer) transform(obj any) (any, error) {
	switch obj := obj.(type) {
	case *v1.Service:
		t.service(obj)
	case *discoveryv1.EndpointSlice:
		t.endpointSlice(obj)
	case *v1.Node:
		t.node(obj)
	case *v1.Pod:
		t.meta(&obj.ObjectMeta, nil, t.podAnnotations)
		spec := v1.PodSpec{HostNetwork: obj.Spec.HostNetwork}
		status := v1.PodStatus{Phase: v1.PodPhase(t.string(string(obj.Status.Phase)))}
		if t.hostPorts && !spec.HostNetwork {
			spec.InitContainers, spec.Containers = withHostPorts(obj.Spec.InitContainers), withHostPorts(obj.Spec.Containers)
			status.PodIPs = obj.Status.PodIPs
		}
		obj.Spec, obj.Status = spec, status
	case *v1.Namespace:
		t.meta(&obj.ObjectMeta, t.namespaceLabels, nil)
		obj.Spec, obj.Status = v1.NamespaceSpec{}, v1.NamespaceStatus{}
	case *networkingv1.ServiceCIDR:
		t.meta(&obj.ObjectMeta, nil, nil)
	}
	return obj, nil
}

// withHostPorts keeps the ports of the containers, if one has a hostPort. Containers and ports keep their indexes.
func withHostPorts(list []v1.Container) []v1.Container {
	has := func(p v1.ContainerPort) bool { return p.HostPort != 0 }
	if !slices.ContainsFunc(list, func(c v1.Container) bool { return slices.ContainsFunc(c.Ports, has) }) {
		return nil
	}
	kept := make([]v1.Container, len(list))
	for i := range list {
		if slices.ContainsFunc(list[i].Ports, has) {
			kept[i].Ports = list[i].Ports
		}
	}
	return kept
}

func (t *trimmer) string(s string) string {
	if s == "" {
		return ""
	}
	return *t.text.ptr(s)
}

// meta keeps identity, version and timestamps, and the named labels and annotations.
func (t *trimmer) meta(m *metav1.ObjectMeta, labels, annotations []string) {
	*m = metav1.ObjectMeta{
		Name:              m.Name,
		Namespace:         t.string(m.Namespace),
		UID:               m.UID,
		ResourceVersion:   m.ResourceVersion,
		CreationTimestamp: m.CreationTimestamp,
		DeletionTimestamp: m.DeletionTimestamp,
		Labels:            only(m.Labels, labels),
		Annotations:       only(m.Annotations, annotations),
	}
}

// only returns the named entries of m, and those whose names begin with a name that ends in a slash; nil if there are none: an empty map takes as much
// memory as one with an entry. It uses the caller's keys, so that the decoded ones are freed.
func only(m map[string]string, keys []string) map[string]string {
	var kept map[string]string
	keep := func(key, value string) {
		if kept == nil {
			kept = make(map[string]string, 1)
		}
		kept[key] = value
	}
	for _, key := range keys {
		if value, ok := m[key]; ok {
			keep(key, value)
		}
		if len(m) > 0 && strings.HasSuffix(key, "/") {
			for each, value := range m {
				if strings.HasPrefix(each, key) && kept[each] != value {
					keep(each, value)
				}
			}
		}
	}
	return kept
}

var (
	serviceLabels = []string{LabelServiceProxyName, v1.IsHeadlessService}
	sliceLabels   = []string{discoveryv1.LabelServiceName, v1.IsHeadlessService}
)

func (t *trimmer) service(service *v1.Service) {
	t.meta(&service.ObjectMeta, serviceLabels, t.serviceAnnotations)

	spec := &service.Spec
	spec.Selector = nil
	spec.LoadBalancerIP = ""
	spec.ExternalName = ""
	spec.IPFamilyPolicy = nil
	spec.AllocateLoadBalancerNodePorts = nil
	spec.Type = v1.ServiceType(t.string(string(spec.Type)))
	spec.SessionAffinity = v1.ServiceAffinity(t.string(string(spec.SessionAffinity)))
	spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicy(t.string(string(spec.ExternalTrafficPolicy)))
	spec.InternalTrafficPolicy = t.policies.share(spec.InternalTrafficPolicy)
	spec.LoadBalancerClass = t.text.share(spec.LoadBalancerClass)
	spec.TrafficDistribution = t.text.share(spec.TrafficDistribution)
	spec.ClusterIPs = clip(spec.ClusterIPs)
	if len(spec.ClusterIPs) > 0 && spec.ClusterIPs[0] == spec.ClusterIP {
		spec.ClusterIPs[0] = spec.ClusterIP
	}
	spec.IPFamilies = clip(spec.IPFamilies)
	for i, family := range spec.IPFamilies {
		spec.IPFamilies[i] = v1.IPFamily(t.string(string(family)))
	}
	if config := spec.SessionAffinityConfig; config != nil && config.ClientIP != nil {
		config.ClientIP.TimeoutSeconds = t.timeouts.share(config.ClientIP.TimeoutSeconds)
	}
	spec.Ports = clip(spec.Ports)
	for i := range spec.Ports {
		port := &spec.Ports[i]
		port.Name = t.string(port.Name)
		port.Protocol = v1.Protocol(t.string(string(port.Protocol)))
		port.AppProtocol = nil
		// EndpointSlices have the resolved port.
		port.TargetPort.StrVal = ""
		port.TargetPort.IntVal = 0
		port.TargetPort.Type = 0
	}

	trimConditions(&service.Status)
	for i := range service.Status.LoadBalancer.Ingress {
		ingress := &service.Status.LoadBalancer.Ingress[i]
		ingress.IPMode = t.ipModes.share(ingress.IPMode)
		ingress.Ports = nil
	}
}

// trimConditions keeps what counts of those of ServiceLB.
func trimConditions(s *v1.ServiceStatus) {
	var kept []metav1.Condition
	for _, c := range s.Conditions {
		switch c.Type {
		case nodereport.ConditionAdvertised:
			kept = append(kept, metav1.Condition{Type: c.Type})
		case nodereport.ConditionProbing:
			kept = append(kept, metav1.Condition{Type: c.Type, Status: c.Status, Message: c.Message})
		}
	}
	s.Conditions = kept
}

func (t *trimmer) endpointSlice(slice *discoveryv1.EndpointSlice) {
	trigger := slice.Annotations[v1.EndpointsLastChangeTriggerTime]
	t.meta(&slice.ObjectMeta, sliceLabels, t.sliceAnnotations)
	if t.measurable(trigger) {
		if slice.Annotations == nil {
			slice.Annotations = make(map[string]string, 1)
		}
		slice.Annotations[v1.EndpointsLastChangeTriggerTime] = trigger
	}
	slice.AddressType = discoveryv1.AddressType(t.string(string(slice.AddressType)))

	slice.Ports = clip(slice.Ports)
	for i := range slice.Ports {
		port := &slice.Ports[i]
		port.Name = t.text.share(port.Name)
		port.Protocol = t.protocols.share(port.Protocol)
		port.Port = t.ports.share(port.Port)
		port.AppProtocol = nil
	}

	slice.Endpoints = clip(slice.Endpoints)
	packAddresses(slice.Endpoints)
	for i := range slice.Endpoints {
		endpoint := &slice.Endpoints[i]
		endpoint.Hostname = nil
		endpoint.TargetRef = nil
		endpoint.DeprecatedTopology = nil
		endpoint.Zone = nil // topology uses the hints
		endpoint.NodeName = t.text.share(endpoint.NodeName)
		endpoint.Conditions.Ready = sharedBool(endpoint.Conditions.Ready)
		endpoint.Conditions.Serving = sharedBool(endpoint.Conditions.Serving)
		endpoint.Conditions.Terminating = sharedBool(endpoint.Conditions.Terminating)
		endpoint.Hints = t.hints(endpoint.Hints)
	}
}

// measurable reports whether a trigger time is valid and its latency will be observed.
func (t *trimmer) measurable(trigger string) bool {
	if trigger == "" {
		return false
	}
	at, err := time.Parse(time.RFC3339Nano, trigger)
	// Some writers use whole seconds. Keep changes of the second in which this process
	// started.
	return err == nil && !at.Before(t.start.Truncate(time.Second))
}

// hints returns a shared copy of the usual hints.
func (t *trimmer) hints(hints *discoveryv1.EndpointHints) *discoveryv1.EndpointHints {
	if hints == nil || len(hints.ForZones) > 1 || len(hints.ForNodes) > 1 {
		return hints
	}
	var key hint
	if len(hints.ForZones) == 1 {
		key.zone, key.hasZone = hints.ForZones[0].Name, true
	}
	if len(hints.ForNodes) == 1 {
		key.node, key.hasNode = hints.ForNodes[0].Name, true
	}
	t.hintsMu.Lock()
	defer t.hintsMu.Unlock()
	if shared, ok := t.hintsCache[key]; ok {
		return shared
	}
	if t.hintsCache == nil || len(t.hintsCache) >= poolLimit {
		t.hintsCache = make(map[hint]*discoveryv1.EndpointHints)
	}
	t.hintsCache[key] = hints
	return hints
}

// packAddresses moves the addresses of all endpoints into one string and one array, which are two
// allocations instead of two per endpoint.
func packAddresses(endpoints []discoveryv1.Endpoint) {
	count, length := 0, 0
	for i := range endpoints {
		count += len(endpoints[i].Addresses)
		for _, address := range endpoints[i].Addresses {
			length += len(address)
		}
	}
	if count == 0 {
		return
	}
	var text strings.Builder
	text.Grow(length)
	for i := range endpoints {
		for _, address := range endpoints[i].Addresses {
			text.WriteString(address)
		}
	}
	rest, all := text.String(), make([]string, 0, count)
	for i := range endpoints {
		first := len(all)
		for _, address := range endpoints[i].Addresses {
			all, rest = append(all, rest[:len(address)]), rest[len(address):]
		}
		if len(all) == first {
			endpoints[i].Addresses = nil
			continue
		}
		endpoints[i].Addresses = all[first:len(all):len(all)]
	}
}

func (t *trimmer) node(node *v1.Node) {
	all := node.Labels
	t.meta(&node.ObjectMeta, nil, nil)
	if t.addresses {
		node.Spec, node.Status = v1.NodeSpec{PodCIDRs: node.Spec.PodCIDRs}, v1.NodeStatus{Addresses: node.Status.Addresses}
		return
	}
	node.Labels = all // Services select nodes by any of them
	node.Spec = v1.NodeSpec{PodCIDRs: node.Spec.PodCIDRs, Taints: node.Spec.Taints}
	node.Status = v1.NodeStatus{Addresses: node.Status.Addresses}
}

// clip copies a slice with spare capacity, which decoders leave.
func clip[E any](s []E) []E {
	if len(s) == 0 {
		return nil
	}
	if len(s) == cap(s) {
		return s
	}
	exact := make([]E, len(s))
	copy(exact, s)
	return exact
}
