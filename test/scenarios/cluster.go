// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

// Cluster plays a scenario: Model does it on decision tables, a lab with real
// traffic. Methods for events return when every proxy has processed them. An error
// that wraps errors.ErrUnsupported says what a cluster cannot do: it skips a call,
// or, for an event, the rest of the scenario.
type Cluster interface {
	// Configure is called first, and once for every change. It restarts the proxies
	// unless Config.SameProcess.
	Configure(ctx context.Context, c Config) error
	Apply(ctx context.Context, changes []ObjectChange) error
	Announce(ctx context.Context, prefix netip.Prefix, nodes []string) error
	Address(ctx context.Context, node string, addr netip.Addr, gone bool) error
	Override(ctx context.Context, node string, o proxier.BackendOverride) error
	Restart(ctx context.Context, node string) error
	Reach(ctx context.Context, p Probe) (Observation, error)
}

// Tables is implemented by Clusters with access to the decision tables.
type Tables interface {
	// Table returns the table of a node as text.
	Table(node string) string
	// Changes returns the changes of a node's table since the last call, or since the
	// proxy's last start.
	Changes(node string) []proxier.PortChange
	// HealthChecks returns the health checks that the node answers.
	HealthChecks(node string) map[types.NamespacedName]proxier.HealthCheck
	// Problems returns the problems that any node has reported so far.
	Problems() []proxier.Problem
}

// Probe is one or more calls.
type Probe struct {
	From     string // node, pod or client
	To       netip.AddrPort
	Protocol proxier.Protocol
	// Via is the node to which the network routes a client's packets for the target;
	// empty for the usual route.
	Via string
	// Tries is how many connections to make, one after the other and each from
	// another port: enough to see every backend almost certainly.
	Tries int
	// Silent says that no answer is expected: one try with a short timeout suffices.
	Silent bool
	// Flow is the label of a long-lived connection, which is opened or continued; empty
	// for none. Tries is then 1.
	Flow string
}

// Observation is the result of a probe.
type Observation struct {
	Answers  []Answer
	Failures []Failure
	// Path is unknown to an observer of real traffic.
	Path Path
}

// Answer of a backend.
type Answer struct {
	Server string // name of the node or pod
	// Source is the client's address as the backend saw it; the zero Addr if unknown.
	Source netip.Addr
}

// Failure is how a call failed.
type Failure uint8

// The failures.
const (
	ConnectionRefused Failure = iota // ECONNREFUSED, for any reason
	TimedOut
	NotPermitted // EPERM, at once
	Unreachable  // a router or the host itself has no route
)

func (f Failure) String() string {
	return [...]string{"refused", "timed out", "not permitted", "unreachable"}[f]
}

// Path reports whether a proxy handled a call.
type Path uint8

// The paths.
const (
	PathUnknown Path = iota
	Proxied
	Passed
)

func serversOf(o Observation) (list []string) {
	for _, a := range o.Answers {
		if !slices.Contains(list, a.Server) {
			list = append(list, a.Server)
		}
	}
	slices.Sort(list)
	return list
}

// String summarises an observation.
func (o Observation) String() string {
	counts := map[string]int{}
	for _, a := range o.Answers {
		counts[fmt.Sprintf("%s saw %s", a.Server, sourceText(a.Source))]++
	}
	for _, f := range o.Failures {
		counts[f.String()]++
	}
	var words []string
	for word, n := range counts {
		words = append(words, fmt.Sprintf("%s (%d)", word, n))
	}
	slices.Sort(words)
	if o.Path == Passed {
		words = append(words, "passed")
	}
	return "observed: " + strings.Join(words, ", ")
}

func sourceText(a netip.Addr) string {
	if !a.IsValid() {
		return "anything"
	}
	return a.String()
}
