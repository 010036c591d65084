// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ServiceHandler receives the Services of a source. A source calls
// OnServiceSynced once, after every Service of its first full list, and holds
// no lock that another handler call could need.
//
// An object handed over is read-only for the receiver and must not be changed
// by the source afterwards. The old object of an update, and that of a delete,
// need only namespace and name.
type ServiceHandler interface {
	OnServiceAdd(service *v1.Service)
	OnServiceUpdate(oldService, service *v1.Service)
	OnServiceDelete(service *v1.Service)
	OnServiceSynced()
}

// EndpointSliceHandler is ServiceHandler for EndpointSlices. Old and deleted objects also
// need the kubernetes.io/service-name label.
type EndpointSliceHandler interface {
	OnEndpointSliceAdd(slice *discoveryv1.EndpointSlice)
	OnEndpointSliceUpdate(oldSlice, slice *discoveryv1.EndpointSlice)
	OnEndpointSliceDelete(slice *discoveryv1.EndpointSlice)
	OnEndpointSlicesSynced()
}

// NodeHandler receives the Node object of the node this process runs on.
// Nothing waits for OnNodeSynced: a proxy serves before its Node exists.
type NodeHandler interface {
	OnNodeAdd(node *v1.Node)
	OnNodeUpdate(oldNode, node *v1.Node)
	OnNodeDelete(node *v1.Node)
	OnNodeSynced()
}

// Handler is everything a source feeds.
type Handler interface {
	ServiceHandler
	EndpointSliceHandler
	NodeHandler
}

// Problem is why one object, or a part of it, cannot be served. Other objects are not
// affected.
type Problem struct {
	// Kind of the object: Service, EndpointSlice, Node, Pod, Namespace, or File for a
	// manifest that does not parse.
	Kind string
	// Object that has the problem; for a File, Name is its path.
	Object types.NamespacedName
	// UID of the object if known: kubectl finds Events by it.
	UID types.UID
	// Field is the path inside the object; empty for the whole object.
	Field string
	// Reason is a short CamelCase word, fit for an Event and a metric label.
	Reason string
	// Message says what is wrong, and how the proxy handles it.
	Message string
}

// Reporter reports problems to users: in the log, metrics, and Events. It must
// not block and may be called from any goroutine.
type Reporter interface {
	Report(Problem)
}

// ReporterFunc makes a function a Reporter.
type ReporterFunc func(Problem)

// Report calls f.
func (f ReporterFunc) Report(p Problem) { f(p) }

// Reasons of Problems.
const (
	ReasonInvalidObject     = "InvalidObject"                   // a field holds what the API would reject
	ReasonConflict          = "Conflict"                        // two objects claim the same thing
	ReasonCapacity          = "Capacity"                        // does not fit into a kernel table
	ReasonInvalidFile       = "InvalidFile"                     // a manifest cannot be read or parsed
	ReasonInvalidConfig     = "InvalidConfig"                   // the configuration file is invalid
	ReasonIncompleteNode    = "IncompleteNode"                  // the Node lacks what the configuration needs of it
	ReasonDuplicateName     = "DuplicateName"                   // two manifests hold the same object
	ReasonUnsupported       = "Unsupported"                     // no tier on this node can serve it
	ReasonUnguarded         = "Unguarded"                       // source ranges leave an address family open
	ReasonFlowsNotClosed    = "FlowsNotClosed"                  // sockets of a removed backend could not be closed
	ReasonFiltersBeforeDNAT = "FiltersBeforeDNAT"               // rules of the host act on what clients dialled
	ReasonRepaired          = "KernelStateRepaired"             // another process removed kernel state, which was restored
	ReasonBypassed          = "ProgramsBypassed"                // a foreign program runs before those of the proxy
	ReasonRulesRefused      = "RulesRefused"                    // the kernel refuses the rules of a service port
	ReasonServerRefused     = "VirtualServerRefused"            // the kernel refuses a virtual server of IPVS
	ReasonNoHealthCheck     = "FailedToStartServiceHealthcheck" // the port cannot be bound; upstream's word
)

// ExpectedProblems are the reasons by kind of object, without those of manifests. Counters of them begin at 0, so
// that the first problem is an increase.
var ExpectedProblems = map[string][]string{
	"Service":       {ReasonInvalidObject, ReasonConflict, ReasonCapacity, ReasonUnsupported, ReasonUnguarded, ReasonRulesRefused, ReasonServerRefused, ReasonNoHealthCheck},
	"EndpointSlice": {ReasonInvalidObject},
	"Node":          {ReasonInvalidConfig, ReasonIncompleteNode, ReasonUnsupported, ReasonFlowsNotClosed, ReasonFiltersBeforeDNAT, ReasonRepaired, ReasonBypassed},
	"Pod":           {ReasonInvalidObject, ReasonConflict, ReasonCapacity, ReasonUnsupported},
	"Namespace":     {ReasonInvalidObject},
}
