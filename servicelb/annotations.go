// SPDX-License-Identifier: Apache-2.0

package servicelb

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// Class is the loadBalancerClass of Services that are served.
const Class = nodereport.Class

const prefix = "servicelb.tandem-proxy.dev/"

// Annotations of Services.
const (
	// AnnotationAddresses is that of package nodereport. Of the names of interfaces, * stands for any characters.
	AnnotationAddresses = nodereport.AnnotationAddresses
	// AnnotationPriority is a number: of several Services that want a port, the one with the greatest gets it. The default is 0.
	AnnotationPriority = prefix + "priority"
	// AnnotationReservedPorts is a list of ports, separated by commas, of those in ReservedPorts that the Service may take.
	AnnotationReservedPorts = prefix + "reserved-ports"
	// AnnotationListeners is a ListenerPolicy.
	AnnotationListeners = prefix + "host-listeners"
)

// Annotations are those that a Service may have.
func Annotations() []string {
	return []string{AnnotationAddresses, AnnotationPriority, AnnotationReservedPorts, AnnotationListeners}
}

// What K3s' controller reads and writes.
const (
	// LabelEnable of a node: if any node has it, only those where it is true are used.
	LabelEnable = "svccontroller.k3s.cattle.io/enablelb"
	// LabelPool of nodes and Services: a Service that has it gets the nodes with the same value.
	LabelPool = "svccontroller.k3s.cattle.io/lbpool"
	// annotationsOfPods are about pods, which are not needed here.
	annotationTolerations   = "svccontroller.k3s.cattle.io/tolerations"
	annotationPriorityClass = "svccontroller.k3s.cattle.io/priorityclassname"
)

// Finalizers are those that K3s' controller sets, today's and the former one. Once it is turned off, no other controller removes them.
var Finalizers = []string{"service.kubernetes.io/load-balancer-cleanup", "svccontroller.k3s.cattle.io/daemonset"}

// ReservedPorts are never taken from the host unless AnnotationReservedPorts names them: SSH, etcd, the API server, kubelet and kube-proxy.
var ReservedPorts = []int32{22, 2379, 2380, 6443, 10249, 10250, 10256}

// wishes are what the annotations of a Service say.
type wishes struct {
	addresses  []netip.Prefix
	interfaces []string // patterns
	restricts  bool     // addresses and interfaces count, even if none is valid
	priority   int
	reserved   []int32
	listeners  ListenerPolicy // empty if the annotation does not say
	invalid    []Reason
	ignored    []string // annotations that have no effect
}

// maxAnnotation is the size up to which an annotation is read, in bytes; an API server takes 256 KiB. maxInvalid bounds how many of its parts
// are told of.
const maxAnnotation, maxInvalid = 4096, 8

func (o *Options) wishesOf(s *v1.Service) (w wishes) {
	bad := func(key, format string, args ...any) {
		if len(w.invalid) < maxInvalid {
			w.invalid = append(w.invalid, Reason{InvalidAnnotation, fmt.Sprintf("annotation %s: %s", key, fmt.Sprintf(format, args...))})
		}
	}
	annotation := func(key string) (text string, there bool) {
		if text, there = s.Annotations[key]; there && slices.Contains(o.Forbidden, key) {
			bad(key, "the administrator forbids it; it is ignored")
			return "", false
		}
		if len(text) > maxAnnotation {
			bad(key, "longer than %d characters; what it lists is ignored", maxAnnotation)
			text = ""
		}
		return text, there
	}
	if text, there := annotation(AnnotationAddresses); there {
		w.restricts = true
		for _, part := range fields(text) {
			if p, err := parsePrefix(part); err == nil {
				w.addresses = append(w.addresses, p)
			} else if isInterface(part) {
				w.interfaces = append(w.interfaces, part)
			} else {
				bad(AnnotationAddresses, "%.64q is neither an address nor a CIDR nor the name of an interface; it is ignored", part)
			}
		}
	}
	if text, there := annotation(AnnotationPriority); there {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			bad(AnnotationPriority, "%.32q is not a number; the priority is 0", text)
		}
		w.priority = int(n)
	}
	reserved, _ := annotation(AnnotationReservedPorts)
	for _, part := range fields(reserved) {
		n, err := strconv.ParseUint(part, 10, 16)
		if err != nil || !slices.Contains(ReservedPorts, int32(n)) {
			bad(AnnotationReservedPorts, "%.32q is not one of %v; it is ignored", part, ReservedPorts)
			continue
		}
		w.reserved = append(w.reserved, int32(n))
	}
	if text, there := annotation(AnnotationListeners); there {
		policy, err := ParseListenerPolicy(text)
		if err != nil {
			bad(AnnotationListeners, "%v; it is ignored", err)
		}
		w.listeners = policy
	}
	for _, key := range []string{annotationTolerations, annotationPriorityClass} {
		if _, there := s.Annotations[key]; there {
			w.ignored = append(w.ignored, key)
		}
	}
	return w
}

func fields(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
}

func parsePrefix(text string) (netip.Prefix, error) {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p.Masked(), nil
	}
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		return netip.Prefix{}, fmt.Errorf("not an address: %.64q", text)
	}
	return netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()), nil
}

// isInterface reports whether a text may be the name of an interface, or a pattern of some, and no mistyped address.
func isInterface(text string) bool {
	const longest = 15 // IFNAMSIZ, without the NUL
	_, err := path.Match(text, "")
	return err == nil && len(text) <= longest && !strings.ContainsAny(text, "/:") && strings.ContainsFunc(text, unicode.IsLetter)
}

// wants reports whether a Service is to have an address of a node. The interface is empty if it is not known.
func (w *wishes) wants(a netip.Addr, device string) bool {
	return !w.restricts || slices.ContainsFunc(w.addresses, func(p netip.Prefix) bool { return p.Contains(a) }) ||
		device != "" && slices.ContainsFunc(w.interfaces, func(pattern string) bool { ok, _ := path.Match(pattern, device); return ok })
}
