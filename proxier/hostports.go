// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// maxHostPorts is how many hostPorts of one Pod are served: it must not take the place of all Services.
const maxHostPorts = 1024

// podPrefix begins the name of a Pod whose hostPorts are served, where those of Services stand. No Service has a colon in
// its name.
const podPrefix = "pod:"

// IsPod reports whether the decision is about hostPorts of a Pod.
func (d *Decision) IsPod() bool { return strings.HasPrefix(d.Name.Name, podPrefix) }

// Problem begins a report about the Service, or the Pod, that the decision is of.
func (d *Decision) Problem(reason string) Problem {
	p := Problem{Kind: "Service", Object: d.Name.NamespacedName, UID: d.UID, Field: "spec.ports", Reason: reason}
	if d.IsPod() {
		p.Kind, p.Object.Name, p.Field = "Pod", strings.TrimPrefix(p.Object.Name, podPrefix), "spec.containers"
	}
	return p
}

func podName(p *v1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: p.Namespace, Name: podPrefix + p.Name}
}

// UpdatePod records the newest state of a Pod of this node, whose hostPorts are served, and reports whether there is work
// pending, for this or any other object.
func (t *ChangeTracker) UpdatePod(pod *v1.Pod) bool {
	service, slices := parsePod(pod, t.report)
	return t.setPod(podName(pod), service, slices)
}

// DeletePod records that a Pod is gone.
func (t *ChangeTracker) DeletePod(pod *v1.Pod) bool { return t.setPod(podName(pod), nil, nil) }

func (t *ChangeTracker) setPod(name types.NamespacedName, service *Service, slices []*EndpointSlice) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[name]
	if e == nil {
		if service == nil {
			return len(t.dirty) > 0
		}
		e = t.add(name)
	}
	if e.is(service, slices) {
		return len(t.dirty) > 0
	}
	e.service, e.slices = service, slices
	return t.mark(e)
}

// parsePod returns the hostPorts of a Pod, as a service port each, and the addresses of the Pod as their only endpoints. It
// returns nil for a Pod without any: one that has ended, has no address yet, or shares the addresses of the node.
// Readiness does not matter, as for the portmap plugin of the CNI.
func parsePod(pod *v1.Pod, report func(Problem)) (*Service, []*EndpointSlice) {
	if pod.Spec.HostNetwork || pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed {
		return nil, nil
	}
	reported := 0
	invalid := func(field, format string, args ...any) {
		if reported++; reported <= maxReported {
			report(Problem{
				Kind: "Pod", Object: types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, UID: pod.UID,
				Field: field, Reason: ReasonInvalidObject, Message: fmt.Sprintf(format, args...),
			})
		}
	}
	s := &Service{
		Name: podName(pod), UID: pod.UID, Created: Seconds(pod.CreationTimestamp.Unix()), IsPod: true, ExternalLocal: true,
		More: &ServiceExtras{},
	}
	var targets []endpointPort
	for _, containers := range []struct {
		field string
		list  []v1.Container
	}{{"spec.initContainers", pod.Spec.InitContainers}, {"spec.containers", pod.Spec.Containers}} {
		for i := range containers.list {
			for j := range containers.list[i].Ports {
				p := &containers.list[i].Ports[j]
				field := func(name string) string { return fmt.Sprintf("%s[%d].ports[%d].%s", containers.field, i, j, name) }
				if p.HostPort == 0 {
					continue
				}
				protocol, err := ParseProtocol(p.Protocol)
				at, errIP := parseHostIP(p.HostIP)
				switch {
				case err != nil:
					invalid(field("protocol"), "%v; the hostPort is not served", err)
				case errIP != nil:
					invalid(field("hostIP"), "%v; the hostPort is not served", errIP)
				case p.HostPort < 1 || p.HostPort > 65535:
					invalid(field("hostPort"), "%d is outside 1–65535; it is not served", p.HostPort)
				case len(s.Ports) == maxHostPorts:
					invalid(field("hostPort"), "%d hostPorts of a Pod are served at most; the rest is not", maxHostPorts)
				case p.ContainerPort < 1 || p.ContainerPort > 65535:
					invalid(field("containerPort"), "%d is outside 1–65535; the hostPort is not served", p.ContainerPort)
				default:
					name := strconv.Itoa(int(p.HostPort))
					if at.IsValid() {
						name = netip.AddrPortFrom(at, uint16(p.HostPort)).String()
					}
					if s.hasPort(name, protocol, nil) {
						invalid(field("hostPort"), "%s port %s is there twice; the first one is served", protocol, name)
						continue
					}
					s.Ports = append(s.Ports, ServicePort{Name: name, Port: uint16(p.HostPort), Protocol: protocol})
					s.More.HostIPs = append(s.More.HostIPs, at)
					targets = append(targets, endpointPort{name: name, port: uint16(p.ContainerPort), protocol: protocol})
				}
			}
		}
	}
	if len(s.Ports) == 0 {
		return nil, nil
	}
	var list []*EndpointSlice
	for i := range pod.Status.PodIPs {
		addr, _, err := parseVIP(pod.Status.PodIPs[i].IP)
		if err != nil {
			invalid(fmt.Sprintf("status.podIPs[%d].ip", i), "%v; it is not served", err)
			continue
		}
		family := FamilyOf(addr)
		if s.More.PodIPs[family] {
			continue
		}
		s.More.PodIPs[family] = true
		flags := ready | serving | onNode
		if pod.DeletionTimestamp != nil {
			flags = flags&^ready | terminating
		}
		list = append(list, &EndpointSlice{
			Name: family.String(), family: family, weight: DefaultWeight, ports: targets, endpoints: []Endpoint{{Addr: addr, flags: flags}},
		})
	}
	if list == nil {
		return nil, nil
	}
	slices.SortFunc(list, func(a, b *EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	return s, list
}

// parseHostIP returns the zero Addr for all addresses of the node. An unspecified address is for all of its family.
func parseHostIP(text string) (netip.Addr, error) {
	if text == "" {
		return netip.Addr{}, nil
	}
	addr, _, err := parseStoredAddr(text)
	if err != nil || addr.Is4In6() || addr.Zone() != "" || addr.IsMulticast() {
		return netip.Addr{}, fmt.Errorf("%q is not a unicast IP address", text)
	}
	return addr, nil
}

// hostPorts appends the frontends of a hostPort in one family.
func (t *Table) hostPorts(out []Frontend, s *Service, port *ServicePort, family Family) []Frontend {
	i := slices.Index(s.Ports, *port)
	if !s.More.PodIPs[family] || i < 0 {
		return out
	}
	at, kind := s.More.HostIPs[i], HostIP
	if !at.IsValid() || at.IsUnspecified() {
		if at.IsValid() && FamilyOf(at) != family {
			return out
		}
		at, kind = unspecified[family], HostPort
	}
	if FamilyOf(at) != family || at.IsLoopback() && t.policy.NoLoopbackHostIPs {
		return out
	}
	return append(out, Frontend{Addr: netip.AddrPortFrom(at, port.Port), Kind: kind, Routes: t.hostPortRoutes(s, family)})
}

// unservedHostPort is the problem of a hostPort that has no frontend.
func (c *PortChange) unservedHostPort() (Problem, bool) {
	if !c.New.IsPod() || len(c.New.Frontends) > 0 || c.Old != nil && len(c.Old.Frontends) == 0 {
		return Problem{}, false
	}
	problem := c.New.Problem(ReasonUnsupported)
	problem.Message = fmt.Sprintf("hostPort %s/%s is not served: its hostIP is of a family of which the Pod has no address, or a loopback address, which mode ebpf alone serves",
		c.New.Name.Port, c.New.Name.Protocol)
	return problem, true
}

// hostPortRoutes are those of externalTrafficPolicy: Local, but replies to pods have to come back through this node: they are
// perhaps on one bridge with the Pod.
func (t *Table) hostPortRoutes(s *Service, family Family) [Origins]Route {
	routes := t.externalRoutes(s, family)
	routes[FromPod] = Route{Set: SetOf(family, false), Source: AnySource}
	return routes
}
