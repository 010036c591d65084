// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

// Run plays a scenario and compares the results with its expectations.
func Run(t testing.TB, s *Scenario, c Cluster) {
	t.Helper()
	run(t, s, c, nil)
}

type player struct {
	t testing.TB
	*Scenario
	cluster  Cluster
	tables   Tables                  // nil if the cluster has none
	update   func(file, text string) // gets texts instead of comparing them; nil for none
	config   Config
	objects  map[string]metav1.Object
	sticky   map[string]string   // servers by label
	flows    map[string]flowSeen // by label
	expected map[Problem]bool
	extra    map[netip.Addr]string // additional addresses of nodes
	line     int

	calls       int      // number of calls made
	unsupported []string // reasons for calls that were not made
}

type flowSeen struct {
	call        Call
	last        string // server
	unsupported error  // why it could not be opened; nil if it could
}

func run(t testing.TB, s *Scenario, c Cluster, update func(file, text string)) {
	t.Helper()
	r := player{
		t: t, Scenario: s, cluster: c, update: update, config: DefaultConfig(),
		objects: map[string]metav1.Object{}, sticky: map[string]string{}, flows: map[string]flowSeen{}, expected: map[Problem]bool{}, extra: map[netip.Addr]string{},
	}
	r.tables, _ = c.(Tables)
	ctx := t.Context()
	// The first config command is the configuration with which the proxies start.
	steps := s.Steps
	if len(steps) > 0 {
		if first, ok := steps[0].Command.(Configure); ok {
			r.set(first)
			steps = steps[1:]
		}
	}
	if r.failed(c.Configure(ctx, r.config)) {
		return
	}
	for i := range steps {
		r.line = steps[i].Line
		if r.tables != nil && isEvent(steps[i].Command) {
			for _, n := range s.Nodes {
				r.tables.Changes(n.Name) // of earlier events
			}
		}
		if r.failed(r.step(ctx, steps[i].Command)) {
			return
		}
	}
	switch {
	case len(r.unsupported) > 0 && r.calls == 0:
		t.Skipf("missing: no call can be made: %s", strings.Join(r.unsupported, "; "))
	case len(r.unsupported) > 0:
		t.Logf("some calls cannot be made: %s", strings.Join(r.unsupported, "; "))
	}
	if r.tables == nil {
		return
	}
	for _, p := range r.tables.Problems() {
		if !r.expected[problemOf(p)] {
			r.expected[problemOf(p)] = true // several nodes may report the same one
			t.Errorf("%s.txtar: unexpected problem: %s %s %q %s: %s", s.Name, p.Kind, p.Object, p.Field, p.Reason, p.Message)
		}
	}
}

func (r *player) errorf(format string, args ...any) {
	r.t.Helper()
	r.t.Errorf("%s.txtar:%d: %s", r.Name, r.line, fmt.Sprintf(format, args...))
}

// failed reports whether the scenario must end because of an error.
func (r *player) failed(err error) bool {
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		r.t.Skipf("missing: %s.txtar:%d: %v", r.Name, r.line, err)
	case err != nil:
		r.errorf("%v", err)
	}
	return err != nil
}

// call handles the error of a call. If it cannot be made here, the scenario continues.
func (r *player) call(err error) error {
	if !errors.Is(err, errors.ErrUnsupported) {
		r.calls++
		return err
	}
	if text := err.Error(); !slices.Contains(r.unsupported, text) {
		r.unsupported = append(r.unsupported, text)
	}
	return nil
}

func (r *player) set(c Configure) {
	for _, s := range c.Settings {
		if err := r.config.Set(s); err != nil {
			r.errorf("%v", err)
		}
	}
}

func (r *player) step(ctx context.Context, command Command) error {
	switch c := command.(type) {
	case Configure:
		r.set(c)
		return r.cluster.Configure(ctx, r.config)
	case Apply:
		return r.apply(ctx, c)
	case Delete:
		return r.delete(ctx, c)
	case Announce:
		return r.cluster.Announce(ctx, c.Prefix, c.Nodes)
	case Address:
		if c.Gone {
			delete(r.extra, c.Addr)
		} else {
			r.extra[c.Addr] = c.Node
		}
		return r.cluster.Address(ctx, c.Node, c.Addr, c.Gone)
	case Override:
		return r.cluster.Override(ctx, c.Node, c.BackendOverride)
	case Restart:
		return r.cluster.Restart(ctx, c.Node)
	case Reach:
		return r.call(r.reach(ctx, c))
	case Flow:
		return r.call(r.flow(ctx, c))
	}
	if r.tables == nil {
		return nil
	}
	switch c := command.(type) {
	case Table:
		r.text(c.File, r.tables.Table(c.Node))
	case Changes:
		r.text(c.File, changesText(r.tables.Changes(c.Node)))
	case HealthCheck:
		r.healthCheck(c)
	case Problem:
		r.expected[c] = true
		if !slices.ContainsFunc(r.tables.Problems(), func(p proxier.Problem) bool { return problemOf(p) == c }) {
			var list []string
			for _, p := range r.tables.Problems() {
				list = append(list, strings.Join(problemOf(p).words(nil), " "))
			}
			slices.Sort(list)
			r.errorf("it was not reported; reported problems:\n%s", strings.Join(slices.Compact(list), "\n"))
		}
	default:
		return fmt.Errorf("unknown command %T", command)
	}
	return nil
}

func isEvent(c Command) bool {
	switch c.(type) {
	case Configure, Apply, Delete, Announce, Address, Override, Restart:
		return true
	}
	return false
}

func key(o metav1.Object) string {
	kind := "node"
	switch o.(type) {
	case *v1.Service:
		kind = "service"
	case *discoveryv1.EndpointSlice:
		kind = "endpointslice"
	case *v1.Pod:
		kind = "pod"
	}
	return kind + " " + o.GetNamespace() + "/" + o.GetName()
}

func (r *player) apply(ctx context.Context, c Apply) error {
	objects, err := r.Objects(c.File)
	if err != nil {
		return err
	}
	var changes []ObjectChange
	for _, o := range objects {
		old := r.objects[key(o)]
		if n, ok := o.(*v1.Node); ok && old == nil {
			// Nodes exist from the start.
			if old, err = r.NodeObject(n.Name); err != nil {
				return err
			}
		}
		r.objects[key(o)] = o
		changes = append(changes, ObjectChange{Old: old, New: o})
	}
	return r.cluster.Apply(ctx, changes)
}

func (r *player) delete(ctx context.Context, c Delete) error {
	k := c.Kind + " " + c.Namespace + "/" + c.Name
	o := r.objects[k]
	if o == nil {
		return fmt.Errorf("there is no %s", k)
	}
	delete(r.objects, k)
	return r.cluster.Apply(ctx, []ObjectChange{{Old: o}})
}

func (r *player) text(file, got string) {
	if r.update != nil {
		r.update(file, got)
		return
	}
	if want, _ := r.File(file); got != want {
		r.errorf("%s (-want +got):\n%s", file, diffLines(want, got))
	}
}

func (r *player) healthCheck(c HealthCheck) {
	h, ok := r.tables.HealthChecks(c.Node)[types.NamespacedName{Namespace: c.Namespace, Name: c.Name}]
	if ok == c.None || h.Ready != c.Ready {
		r.errorf("there is a health check: %t, with %d ready", ok, h.Ready)
	}
}

func problemOf(p proxier.Problem) Problem {
	return Problem{p.Kind, p.Object.Namespace, p.Object.Name, p.Field, p.Reason}
}

func (r *player) probe(call Call, e *Expectation) Probe {
	p := Probe{From: call.From, To: r.Resolve(call.To), Protocol: call.To.Protocol, Via: call.Via, Tries: 1}
	switch e.Outcome {
	case Backends:
		// With n backends, the probability to miss one is n(1-1/n)^tries.
		p.Tries = 16 + 16*len(e.Backends)
	case NoAnswer:
		p.Silent = true
	case Passes:
		p.Silent = r.holder(call, p.To.Addr()) == ""
	}
	return p
}

func (r *player) reach(ctx context.Context, c Reach) error {
	o, err := r.cluster.Reach(ctx, r.probe(c.Call, &c.Expect))
	if err != nil {
		return err
	}
	servers := serversOf(o)
	wrong := r.judge(c.Call, &c.Expect, o)
	if wrong == "" && c.Expect.Outcome == Backends {
		if c.Expect.Sticky {
			wrong = r.stuck(&c.Expect, servers)
		} else if len(servers) != len(c.Expect.Backends) {
			wrong = "not all backends answered"
		}
	}
	if wrong != "" {
		r.errorf("%s; %s", wrong, o)
	}
	return nil
}

func (r *player) stuck(e *Expectation, servers []string) string {
	if len(servers) != 1 {
		return "not the same one every time"
	}
	if e.Label == "" {
		return ""
	}
	was, known := r.sticky[e.Label]
	r.sticky[e.Label] = servers[0]
	if known && was != servers[0] {
		return fmt.Sprintf("it was %s before", was)
	}
	return ""
}

func (r *player) flow(ctx context.Context, c Flow) error {
	seen := r.flows[c.Label]
	if seen.unsupported != nil {
		return seen.unsupported
	}
	if c.Call != nil {
		seen.call = *c.Call
	}
	e := c.Expect
	if e.Outcome == Same {
		e.Outcome, e.Backends = Backends, []string{seen.last}
	}
	p := r.probe(seen.call, &e)
	p.Tries, p.Flow = 1, c.Label
	o, err := r.cluster.Reach(ctx, p)
	if err != nil {
		if errors.Is(err, errors.ErrUnsupported) {
			r.flows[c.Label] = flowSeen{unsupported: err}
		}
		return err
	}
	wrong := r.judge(seen.call, &e, o)
	if len(o.Answers) > 0 {
		seen.last = o.Answers[0].Server
	}
	r.flows[c.Label] = seen
	if wrong != "" {
		r.errorf("%s; %s", wrong, o)
	}
	return nil
}

// judge returns what is wrong with an observation. It does not check whether all
// backends answered.
func (r *player) judge(call Call, e *Expectation, o Observation) string {
	if (o.Path == Passed) != (e.Outcome == Passes) && o.Path != PathUnknown {
		return map[bool]string{true: "no proxy handled the call", false: "a proxy handled the call"}[o.Path == Passed]
	}
	only := func(allowed ...Failure) string {
		for _, f := range o.Failures {
			if !slices.Contains(allowed, f) {
				return "a call failed in another way"
			}
		}
		return ""
	}
	switch e.Outcome {
	case Backends:
		if len(o.Failures) > 0 {
			return "a call failed"
		}
		if len(o.Answers) == 0 {
			return "nothing was observed"
		}
		for _, a := range o.Answers {
			if !slices.Contains(e.Backends, a.Server) {
				return a.Server + " is not an expected backend"
			}
			if !r.isSource(call, e, a) {
				return fmt.Sprintf("%s saw source %s", a.Server, sourceText(a.Source))
			}
		}
		return ""
	case Passes:
		owner := r.holder(call, r.Resolve(call.To).Addr())
		for _, a := range o.Answers {
			if a.Server != owner {
				return "another endpoint answered"
			}
		}
		if owner == "" {
			return only(TimedOut, Unreachable)
		}
		return only(ConnectionRefused)
	}
	if len(o.Answers) > 0 {
		return "there was an answer"
	}
	if len(o.Failures) == 0 {
		return "nothing was observed"
	}
	if e.Outcome == Refused {
		return only(ConnectionRefused)
	}
	return only(TimedOut, NotPermitted)
}

// isSource reports whether a backend saw the expected source.
func (r *player) isSource(call Call, e *Expectation, a Answer) bool {
	who := e.Source
	switch {
	case who == "" || who == SourceAny || a.Server == call.From:
		return true
	case who == SourceClient:
		who = call.From
	}
	if !a.Source.IsValid() {
		return false
	}
	// Replies of a node's own backends pass the node in any case.
	near := r.node(who) >= 0 && r.NodeOf(a.Server) == who
	return slices.Contains(r.addresses(who), a.Source) || near && slices.Contains(r.addresses(call.From), a.Source)
}

// addresses returns all addresses of a node, pod or client.
func (r *player) addresses(name string) (list []netip.Addr) {
	for family := range proxier.Families {
		list = append(list, r.Addr(name, family))
		if r.node(name) >= 0 {
			list = append(list, r.gateway(name, family))
		}
	}
	for a, node := range r.extra {
		if node == name {
			list = append(list, a)
		}
	}
	return list
}

// holder returns the name of the owner of the called address; empty for none.
func (r *player) holder(call Call, a netip.Addr) string {
	if a.IsLoopback() {
		return call.From
	}
	return cmp.Or(r.extra[a], r.owner(a.String()))
}
