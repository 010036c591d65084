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

// Cluster plays a scenario: Model does it on decision tables, a lab on real
// traffic. An event is over when every proxy has taken it in. What a cluster
// cannot do is an error that wraps errors.ErrUnsupported: a call like that is
// left out, after an event the rest of the scenario is skipped.
type Cluster interface {
	// Configure comes first of all, and once for every change. Proxies are
	// replaced unless Config.SameProcess.
	Configure(ctx context.Context, c Config) error
	Apply(ctx context.Context, changes []ObjectChange) error
	Announce(ctx context.Context, prefix netip.Prefix, nodes []string) error
	Address(ctx context.Context, node string, addr netip.Addr, gone bool) error
	Restart(ctx context.Context, node string) error
	Reach(ctx context.Context, p Probe) (Observation, error)
}

// Tables is what a Cluster has besides if it can tell what was decided.
type Tables interface {
	// Table of a node as text.
	Table(node string) string
	// Changes of a node's table since the last call; a proxy that started
	// meanwhile begins anew.
	Changes(node string) []proxier.PortChange
	// HealthChecks that the node answers.
	HealthChecks(node string) map[types.NamespacedName]proxier.HealthCheck
	// Problems reported by any node so far.
	Problems() []proxier.Problem
}

// Probe is one or more calls.
type Probe struct {
	From     string // node, pod or client
	To       netip.AddrPort
	Protocol proxier.Protocol
	// Via is the node to which the network leads the target for a client;
	// empty for the usual way.
	Via string
	// Tries is how many connections to make, one after the other and each from
	// a port of its own: enough to see every backend, as good as certainly.
	Tries int
	// Silent says that no answer is expected: one try will do, and a short one.
	Silent bool
	// Flow is the label of a connection that is kept, or gone on with; empty
	// for none. Tries is 1 then.
	Flow string
}

// Observation is what came of a probe.
type Observation struct {
	Answers  []Answer
	Failures []Failure
	// Path is for those who know; an observer of traffic does not.
	Path Path
}

// Answer of a backend.
type Answer struct {
	Server string // name of the node or pod
	// Source that it saw; the zero Addr if it may be any.
	Source netip.Addr
}

// Failure is how a call failed.
type Failure uint8

// The failures.
const (
	ConnectionRefused Failure = iota // ECONNREFUSED, however it came about
	TimedOut
	NotPermitted // EPERM, at once
	Unreachable  // a router or the host itself has no route
)

func (f Failure) String() string {
	return [...]string{"refused", "timed out", "not permitted", "unreachable"}[f]
}

// Path says whether a proxy had to do with a call.
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

// String is an observation in short.
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
