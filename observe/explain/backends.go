// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

// BackendsPath is where kube-proxy reports what operators say of backends on this node. With ParamBackend
// it also reports the service ports that have that backend.
const (
	BackendsPath = "/debug/backends"
	ParamBackend = "backend"
	ParamService = "service"
)

// Backends is the answer, as JSON. Later versions may add fields. They do not rename fields or change
// their meaning.
type Backends struct {
	Node string `json:"node"`
	// StateDirectory is where this process finds the states.
	StateDirectory string `json:"stateDirectory"`
	// States are in force: the last sync had them.
	States []BackendState `json:"states"`
	// Found are the service ports that have the backend that was asked for.
	Found []BackendUse `json:"found"`
}

// BackendState is what an operator says of a backend.
type BackendState struct {
	Address netip.Addr `json:"address"`
	// Port is 0 for all ports.
	Port uint16 `json:"port,omitempty"`
	// Service is namespace/name; empty for all Services.
	Service string               `json:"service,omitempty"`
	State   proxier.BackendState `json:"state"`
	Until   time.Time            `json:"until,omitzero"`
}

// BackendUse is a service port that has a backend.
type BackendUse struct {
	Namespace string         `json:"namespace"`
	Name      string         `json:"name"`
	Port      string         `json:"port"` // its name; empty for an unnamed one
	Protocol  string         `json:"protocol"`
	Address   netip.AddrPort `json:"address"`
	// Cluster and Local are the reasons why the endpoint is in the set of that traffic policy, or is not.
	Cluster string `json:"cluster"`
	Local   string `json:"local"`
	// Eligible says that connections without a Local traffic policy reach it, and Others counts the other
	// endpoints that they reach.
	Eligible bool `json:"eligible"`
	Others   int  `json:"others"`
}

// Backend is an address, with a port unless that is 0, of a Service or of all.
type Backend struct {
	Addr    netip.Addr
	Port    uint16
	Service types.NamespacedName
}

// ParseBackend reads ADDR or ADDR:PORT, and NAMESPACE/NAME or nothing.
func ParseBackend(backend, service string) (b Backend, err error) {
	if at, err := netip.ParseAddrPort(backend); err == nil {
		b.Addr, b.Port = at.Addr(), at.Port()
		if b.Port == 0 {
			return b, fmt.Errorf("backend %q: port 0 is invalid", backend)
		}
	} else if b.Addr, err = netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(backend, "["), "]")); err != nil {
		return b, fmt.Errorf("backend %.64q is neither an address nor an address and port, 10.244.1.7 or [fd00:10:244:1::7]:8080", backend)
	}
	if b.Addr = b.Addr.Unmap(); b.Addr.Zone() != "" || b.Addr.IsUnspecified() {
		return b, fmt.Errorf("backend %.64q: %s is no backend's address", backend, b.Addr)
	}
	if service == "" {
		return b, nil
	}
	b.Service, err = proxier.ParseServiceName(service)
	return b, err
}

// BackendsOf answers for a node on which these overrides are in force.
func BackendsOf(node, stateDirectory string, table *proxier.Table, inForce []proxier.BackendOverride, b Backend) *Backends {
	answer := &Backends{Node: node, StateDirectory: stateDirectory, States: []BackendState{}, Found: []BackendUse{}}
	for _, o := range inForce {
		s := BackendState{Address: o.Addr, Port: o.Port, State: o.State, Until: o.Until}
		if o.Service.Name != "" {
			s.Service = o.Service.String()
		}
		answer.States = append(answer.States, s)
	}
	if !b.Addr.IsValid() {
		return answer
	}
	for _, u := range table.FindBackend(b.Addr, b.Port, b.Service) {
		answer.Found = append(answer.Found, BackendUse{
			Namespace: u.Name.Namespace, Name: u.Name.Name, Port: u.Name.Port, Protocol: u.Name.Protocol.String(),
			Address: u.Addr, Cluster: u.Cluster.String(), Local: u.Local.String(), Eligible: u.Cluster.In(), Others: u.Others,
		})
	}
	return answer
}
