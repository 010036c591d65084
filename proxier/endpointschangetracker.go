// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// LabelHeadless, copied by the controller from a Service to its slices, says
// that no proxy shall serve them.
const LabelHeadless = v1.IsHeadlessService

// maxReported bounds how many bad endpoints of one slice are named one by one.
const maxReported = 3

// UpdateEndpointSlice records the newest state of an EndpointSlice and says
// whether there is work pending, for this or any other object.
func (t *ChangeTracker) UpdateEndpointSlice(slice *discoveryv1.EndpointSlice) bool {
	service := slice.Labels[discoveryv1.LabelServiceName]
	if service == "" {
		t.report(Problem{
			Kind: "EndpointSlice", Object: types.NamespacedName{Namespace: slice.Namespace, Name: slice.Name}, UID: slice.UID,
			Field: "metadata.labels[" + discoveryv1.LabelServiceName + "]", Reason: ReasonInvalidObject,
			Message: "the label names no Service; the slice is ignored",
		})
		return t.Pending()
	}
	name := types.NamespacedName{Namespace: slice.Namespace, Name: service}
	if _, headless := slice.Labels[LabelHeadless]; headless {
		return t.deleteEndpointSlice(name, slice.Name)
	}
	parsed := t.parseEndpointSlice(slice)
	if parsed == nil {
		return t.deleteEndpointSlice(name, slice.Name)
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[name]
	if e == nil {
		e = t.add(name)
	}
	i, found := e.find(slice.Name)
	if found && e.slices[i].equal(parsed) {
		return len(t.dirty) > 0
	}
	t.noteTrigger(e, slice)

	// Lists already handed over are immutable, so a change makes a new one.
	switch {
	case found:
		e.slices = slices.Clone(e.slices)
		e.slices[i] = parsed
	case len(e.slices) == 0 && e.oneSlice[0] == nil:
		e.oneSlice[0] = parsed
		e.slices = e.oneSlice[:1:1]
	default:
		list := make([]*EndpointSlice, 0, len(e.slices)+1)
		list = append(append(append(list, e.slices[:i]...), parsed), e.slices[i:]...)
		e.slices = list
	}
	return t.mark(e)
}

// DeleteEndpointSlice records that an EndpointSlice is gone.
func (t *ChangeTracker) DeleteEndpointSlice(slice *discoveryv1.EndpointSlice) bool {
	service := slice.Labels[discoveryv1.LabelServiceName]
	if service == "" {
		return t.Pending()
	}
	return t.deleteEndpointSlice(types.NamespacedName{Namespace: slice.Namespace, Name: service}, slice.Name)
}

func (t *ChangeTracker) deleteEndpointSlice(service types.NamespacedName, slice string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[service]
	if e == nil {
		return len(t.dirty) > 0
	}
	i, found := e.find(slice)
	if !found {
		return len(t.dirty) > 0
	}
	if len(e.slices) == 1 {
		e.slices = nil
	} else {
		e.slices = slices.Delete(slices.Clone(e.slices), i, i+1)
	}
	return t.mark(e)
}

// noteTrigger keeps the oldest time at which something happened that the next
// sync of this Service will make visible (network programming latency).
func (t *ChangeTracker) noteTrigger(e *entry, slice *discoveryv1.EndpointSlice) {
	text, ok := slice.Annotations[v1.EndpointsLastChangeTriggerTime]
	if !ok {
		return
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil || !at.After(t.started) {
		return // nothing this process could have been late for
	}
	family := IPv4
	if slice.AddressType == discoveryv1.AddressTypeIPv6 {
		family = IPv6
	}
	if was := &e.trigger[family]; *was == 0 || at.UnixNano() < *was {
		*was = at.UnixNano()
	}
}

func (t *ChangeTracker) parseEndpointSlice(slice *discoveryv1.EndpointSlice) *EndpointSlice {
	name := types.NamespacedName{Namespace: slice.Namespace, Name: slice.Name}
	problem := func(field, message string) {
		t.report(Problem{Kind: "EndpointSlice", Object: name, UID: slice.UID, Field: field, Reason: ReasonInvalidObject, Message: message})
	}
	reported := 0
	invalid := func(message, format string, args ...any) {
		if reported++; reported <= maxReported {
			problem(fmt.Sprintf(format, args...), message)
		}
	}

	parsed := &EndpointSlice{Name: slice.Name}
	switch slice.AddressType {
	case discoveryv1.AddressTypeIPv4:
		parsed.family = IPv4
	case discoveryv1.AddressTypeIPv6:
		parsed.family = IPv6
	case discoveryv1.AddressTypeFQDN:
		return nil // served by DNS alone
	default:
		invalid(fmt.Sprintf("unknown address type %q; the slice is ignored", slice.AddressType), "addressType")
		return nil
	}

	parsed.weight = DefaultWeight
	if len(slice.Annotations) > 0 {
		parsed.weight = parseWeight(slice.Annotations, func(field, format string, args ...any) { problem(field, fmt.Sprintf(format, args...)) })
		unknownAnnotations(slice.Annotations, SliceAnnotations, problem)
	}

	if len(slice.Ports) == 1 {
		parsed.ports = parsed.onePort[:0]
	}
	for i := range slice.Ports {
		p := &slice.Ports[i]
		// The API allows both to be absent; then there is nothing to dial.
		if p.Name == nil || p.Port == nil {
			continue
		}
		var text v1.Protocol
		if p.Protocol != nil {
			text = *p.Protocol
		}
		protocol, err := ParseProtocol(text)
		if err != nil {
			invalid(err.Error()+"; the port is ignored", "ports[%d].protocol", i)
			continue
		}
		if *p.Port < 1 || *p.Port > 65535 {
			invalid(fmt.Sprintf("%d is outside 1–65535; the port is ignored", *p.Port), "ports[%d].port", i)
			continue
		}
		parsed.ports = append(parsed.ports, endpointPort{name: *p.Name, port: uint16(*p.Port), protocol: protocol})
	}

	parsed.endpoints = make([]Endpoint, 0, len(slice.Endpoints))
	sorted := true
	var zeros leadingZeros
	for i := range slice.Endpoints {
		e := &slice.Endpoints[i]
		if len(e.Addresses) == 0 {
			invalid("has no address; the endpoint is ignored", "endpoints[%d].addresses", i)
			continue
		}
		addr, nonStandard, err := parseStoredAddr(e.Addresses[0])
		if err != nil || addr.Zone() != "" || addr.Is4In6() || FamilyOf(addr) != parsed.family {
			invalid(fmt.Sprintf("%q is not an %s address; the endpoint is ignored", e.Addresses[0], slice.AddressType), "endpoints[%d].addresses[0]", i)
			continue
		}
		if nonStandard {
			zeros.add(e.Addresses[0], addr, "endpoints[%d].addresses[0]", i)
		}
		flags := t.endpointFlags(e)
		if parsed.weight == 0 {
			flags = flags&^ready | maintenance
		}
		endpoint := Endpoint{Addr: addr, flags: flags, zones: t.zoneHints(e)}
		if n := len(parsed.endpoints); n > 0 && addr.Less(parsed.endpoints[n-1].Addr) {
			sorted = false
		}
		parsed.endpoints = append(parsed.endpoints, endpoint)
	}
	if more := reported - maxReported; more > 0 {
		problem("endpoints", fmt.Sprintf("and %d more endpoints or ports are ignored", more))
	}
	if message := zeros.message(); message != "" {
		problem(zeros.field, message)
	}
	if !sorted {
		slices.SortStableFunc(parsed.endpoints, func(a, b Endpoint) int { return a.Addr.Compare(b.Addr) })
	}
	return parsed
}

func (t *ChangeTracker) endpointFlags(e *discoveryv1.Endpoint) endpointFlags {
	var flags endpointFlags
	if e.Conditions.Ready == nil || *e.Conditions.Ready {
		flags |= ready
	}
	if e.Conditions.Serving == nil || *e.Conditions.Serving {
		flags |= serving
	}
	if e.Conditions.Terminating != nil && *e.Conditions.Terminating {
		flags |= terminating
	}
	switch {
	case e.NodeName == nil || *e.NodeName == "":
	case *e.NodeName == t.nodeName:
		flags |= onNode
	default:
		flags |= elsewhere
	}
	if e.Hints != nil {
		for i := range e.Hints.ForNodes {
			flags |= hasNodeHints
			if e.Hints.ForNodes[i].Name == t.nodeName {
				flags |= hintedThisNode
			}
		}
	}
	return flags
}

// zoneHints interns the zones an endpoint is hinted to. A cluster has few
// different lists of zones, so the pointers can be compared and cost nothing.
func (t *ChangeTracker) zoneHints(e *discoveryv1.Endpoint) *[]string {
	if e.Hints == nil || len(e.Hints.ForZones) == 0 {
		return nil
	}
	var space [128]byte
	key := space[:0]
	for i := range e.Hints.ForZones {
		key = append(append(key, e.Hints.ForZones[i].Name...), 0)
	}
	t.zonesMu.Lock()
	defer t.zonesMu.Unlock()
	if known := t.zones[string(key)]; known != nil {
		return known
	}
	if len(t.zones) >= maxInternedZones {
		clear(t.zones) // hostile input; equal lists may now differ as pointers
	}
	zones := make([]string, len(e.Hints.ForZones))
	for i := range e.Hints.ForZones {
		zones[i] = e.Hints.ForZones[i].Name
	}
	t.zones[string(key)] = &zones
	return &zones
}

const maxInternedZones = 4096
