// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/scenarios"
)

// writer writes a defect as a scenario.
type writer struct {
	*scenarios.Scenario
	facts   proxier.Facts // as of the commands written so far
	pods    [256]int      // by node
	clients int
	notes   []string
	files   int
}

// scenario writes a defect as a scenario that expects the oracle's answers. What scenarios
// cannot express is in the notes.
func (d *defect) scenario() *scenarios.Scenario {
	w := writer{Scenario: &scenarios.Scenario{Name: "disagreement", Title: "A disagreement with the oracle: " + d.what + "."}}
	w.declare(d)
	w.config(d)
	w.facts = plainFacts(d.h.facts)
	w.learn(d.h.facts)
	p := newPlayer(d.h, false, nil)
	for _, st := range d.h.steps {
		w.events(&p.there, st.events)
		quietly(func() { p.play(st) })
		if st.facts != nil {
			w.learn(*st.facts)
		}
	}
	w.expect(d, p)
	if len(w.Steps) > 0 {
		w.Steps[0].Above = []string{""}
	}
	w.Notes = append(w.Notes, w.notes...)
	return w.Scenario
}

func (w *writer) step(c scenarios.Command) { w.Steps = append(w.Steps, scenarios.Step{Command: c}) }

func (w *writer) note(format string, args ...any) {
	if n := "Not told: " + fmt.Sprintf(format, args...); !slices.Contains(w.notes, n) {
		w.notes = append(w.notes, n)
	}
}

// declare declares the owners of all addresses that occur.
func (w *writer) declare(d *defect) {
	nodes := 1
	see := func(text string) {
		addr, err := parseAddr(text)
		if err != nil {
			return
		}
		kind, n, m := byPlan(addr)
		switch kind {
		case "pod":
			w.pods[n] = max(w.pods[n], m)
			nodes = max(nodes, n)
		case "node":
			nodes = max(nodes, n)
		case "client":
			w.clients = max(w.clients, m)
		}
	}
	for _, st := range d.h.steps {
		for _, e := range st.events {
			if e.slice == nil {
				continue
			}
			for _, e := range e.slice.Endpoints {
				if len(e.Addresses) > 0 {
					see(e.Addresses[0])
				}
			}
		}
	}
	if d.flow.Source.IsValid() {
		see(d.flow.Source.Addr().String())
	}
	for n := 1; n <= nodes; n++ {
		w.Nodes = append(w.Nodes, scenarios.Node{Name: fmt.Sprintf("node%d", n)})
	}
	w.Nodes[0].Zone = d.h.facts.Zone
	for n := 1; n <= nodes; n++ {
		for m := 1; m <= w.pods[n]; m++ {
			w.Pods = append(w.Pods, scenarios.Pod{Name: fmt.Sprintf("pod%d-%d", n, m), Node: fmt.Sprintf("node%d", n)})
		}
	}
	for m := 1; m <= w.clients; m++ {
		w.Clients = append(w.Clients, fmt.Sprintf("client%d", m))
	}
}

// byPlan returns the owner of an address: pod m of node n, node n, or client m.
func byPlan(a netip.Addr) (kind string, n, m int) {
	if a.Is4() {
		switch b := a.As4(); {
		case b[0] == 10 && b[1] == 244 && b[2] > 0 && b[3] > 0 && b[3] <= 250:
			return "pod", int(b[2]), int(b[3])
		case b[0] == 172 && b[1] == 18 && b[2] == 0 && b[3] > 0 && b[3] <= 9:
			return "node", int(b[3]), 0
		case b[0] == 198 && b[1] == 51 && b[2] == 100 && b[3] > 0 && b[3] <= 9:
			return "client", 0, int(b[3])
		}
		return "", 0, 0
	}
	b := a.As16()
	m = int(b[15])
	pod, node, client := netip.MustParsePrefix("fd00:10:244::/48"), netip.MustParsePrefix("fd00:18::/96"), netip.MustParsePrefix("2001:db8:51:100::/96")
	switch {
	case b[14] != 0 || m == 0 || m > 250:
	case pod.Contains(a) && b[7] > 0:
		return "pod", int(b[7]), m
	case node.Contains(a) && m <= 9:
		return "node", m, 0
	case client.Contains(a) && m <= 9:
		return "client", 0, m
	}
	return "", 0, 0
}

func nameByPlan(a netip.Addr) string {
	switch kind, n, m := byPlan(a); kind {
	case "pod":
		return fmt.Sprintf("pod%d-%d", n, m)
	case "node":
		return fmt.Sprintf("node%d", n)
	case "client":
		return fmt.Sprintf("client%d", m)
	}
	return ""
}

func detect(p *proxier.Detector) scenarios.Detect {
	switch {
	case p.Interface != "" && p.InterfacePrefix:
		return scenarios.Detect{Mode: scenarios.DetectInterfaceNamePrefix, Interface: p.Interface}
	case p.Interface != "":
		return scenarios.Detect{Mode: scenarios.DetectBridgeInterface, Interface: p.Interface}
	case len(p.CIDRs) > 0:
		return scenarios.Detect{Mode: scenarios.DetectClusterCIDR, CIDRs: p.CIDRs}
	}
	return scenarios.Detect{Mode: scenarios.DetectNone}
}

// config returns the initial configuration of the proxy.
func (w *writer) config(d *defect) {
	c := scenarios.Config{
		Detect: detect(&d.h.facts.Pods), ServiceCIDRs: d.h.facts.ServiceCIDRs,
		NodePortAddresses: d.h.settings.nodePortAddresses, LocalhostNodePorts: d.h.settings.localhostNodePorts,
		MasqueradeAll: d.h.policy.MasqueradeAll, AllowServiceExternalIPs: !d.h.policy.IgnoreExternalIPs, StrictSourceRanges: d.h.policy.StrictSourceRanges,
	}
	if s := c.Settings(); len(s) > 0 {
		w.step(scenarios.Configure{Settings: s})
	}
}

// plainFacts are the facts at the start of a scenario.
func plainFacts(f proxier.Facts) proxier.Facts {
	f.NodeIPs, f.LocalAddrs, f.Uplinks = plainNodeIPs, plainLocalAddrs, plainUplinks
	return f
}

// learn writes changes of the node's facts.
func (w *writer) learn(f proxier.Facts) {
	if !slices.Equal(f.Uplinks, w.facts.Uplinks) {
		w.note("the node's uplinks are %v", f.Uplinks)
		w.facts.Uplinks = f.Uplinks
	}
	d := detect(&f.Pods)
	if !slices.Equal(f.ServiceCIDRs, w.facts.ServiceCIDRs) || !reflect.DeepEqual(f.Pods, w.facts.Pods) {
		var cidrs []string
		for _, p := range f.ServiceCIDRs {
			cidrs = append(cidrs, p.String())
		}
		value := cmp.Or(strings.Join(cidrs, ","), "none")
		w.step(scenarios.Configure{Settings: []scenarios.Setting{{Key: "detectLocal", Value: d.String()}, {Key: "serviceCIDRs", Value: value}}})
	}
	if f.Zone != w.facts.Zone || !maps.Equal(f.Labels, w.facts.Labels) || f.NodeIPs != w.facts.NodeIPs {
		n := &v1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: ownNode, Labels: map[string]string{}}}
		for label, value := range f.Labels {
			n.Labels[label] = value
		}
		if f.Zone != "" {
			n.Labels[v1.LabelTopologyZone] = f.Zone
		}
		for _, a := range f.NodeIPs {
			address := v1.NodeAddress{Type: v1.NodeHostName, Address: ownNode} // a placeholder without an IP
			if a.IsValid() {
				address = v1.NodeAddress{Type: v1.NodeInternalIP, Address: a.String()}
			}
			n.Status.Addresses = append(n.Status.Addresses, address)
		}
		w.apply("node", n)
	}
	for _, a := range f.LocalAddrs {
		if !slices.Contains(w.facts.LocalAddrs, a) {
			w.step(scenarios.Address{Node: ownNode, Addr: a})
		}
	}
	for _, a := range w.facts.LocalAddrs {
		switch {
		case slices.Contains(f.LocalAddrs, a):
		case slices.Contains(plainLocalAddrs, a):
			w.note("%s is no address of %s.", a, ownNode)
		default:
			w.step(scenarios.Address{Node: ownNode, Addr: a, Gone: true})
		}
	}
	w.facts = f
	// These addresses cannot be removed.
	w.facts.LocalAddrs = slices.Concat(f.LocalAddrs, plainLocalAddrs)
}

// apply writes objects that change together.
func (w *writer) apply(name string, list ...metav1.Object) {
	if w.files++; w.files > 1 {
		name += fmt.Sprint(w.files)
	}
	if err := w.AddObjects(name+".yaml", list...); err != nil {
		w.note("%v.", err)
		return
	}
	w.step(scenarios.Apply{File: name + ".yaml"})
}

// events writes the events of a step: first deletions, one by one.
func (w *writer) events(there *objects, events []event) {
	var list []metav1.Object
	for _, e := range events {
		if e.gone && len(events) > 1 {
			w.note("what happens at once here does so one by one.")
		}
		switch {
		case e.service != nil && e.gone:
			if there.services[nameOf(e.service)] != nil {
				w.step(scenarios.Delete{Kind: "service", Namespace: e.service.Namespace, Name: e.service.Name})
			}
		case e.gone:
			if there.slices[sliceName(e.slice)] != nil {
				w.step(scenarios.Delete{Kind: "endpointslice", Namespace: e.slice.Namespace, Name: e.slice.Name})
			}
		case e.service != nil:
			s := e.service.DeepCopy()
			s.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
			list = append(list, s)
		default:
			s := e.slice.DeepCopy()
			s.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
			list = append(list, s)
		}
	}
	if len(list) > 0 {
		w.apply("objects", list...)
	}
}

// expect returns the expectation by the oracle's answer.
func (w *writer) expect(d *defect, p *player) {
	c := p.cluster()
	if d.flow.Destination.IsValid() {
		a := c.Ask(d.flow)
		if d.spoil != nil {
			d.spoil(&a)
		}
		if r, why := reach(d.flow, c.Facts.LocalAddrs, &a); why == "" {
			w.step(r)
		} else {
			w.note("%s -> %s %s by %q, of which the oracle says %s; %s.",
				d.flow.Source, d.flow.Destination, d.flow.Protocol, d.flow.Device, strings.Join(strings.Fields(a.String()), " "), why)
		}
	}
	if d.what == "health" {
		checks := c.HealthChecks()
		for _, s := range c.Services {
			h, ok := checks[nameOf(s)]
			w.step(scenarios.HealthCheck{Node: ownNode, Namespace: s.Namespace, Name: s.Name, None: !ok, Ready: h.Ready})
		}
	}
	if d.what == "answer" || d.what == "tier" || d.what == "health" || d.what == "panic" {
		return
	}
	w.Notes = append(w.Notes, "The text is what the table has. What is wrong with it is in the message of the test.")
	w.Files = append(w.Files, scenarios.File{Name: "table.txt", Data: p.s.table().Dump()})
	w.step(scenarios.Table{Node: ownNode, File: "table.txt"})
}

// reach returns the command for a flow, or why there is none.
func reach(f proxier.Flow, localAddrs []netip.Addr, a *Answer) (r scenarios.Reach, why string) {
	who := slices.Index(simplerFlows(f, localAddrs)[:3], f)
	if who < 0 || f.Destination.Addr().IsUnspecified() {
		return r, "no client of a scenario calls like that"
	}
	r.Call = scenarios.Call{
		From: []string{"client1", "pod1-1", ownNode}[who],
		To:   scenarios.Target{Addr: f.Destination.Addr(), Port: f.Destination.Port(), Protocol: f.Protocol},
	}
	if who == 0 {
		r.Call.Via = ownNode
	}
	switch a.Outcome {
	case proxier.Pass:
		r.Expect.Outcome = scenarios.Passes
		if name := nameByPlan(f.Destination.Addr()); name != "" && name != ownNode {
			return r, "it goes on to " + name
		}
		return r, ""
	case proxier.Rejected:
		r.Expect.Outcome = scenarios.Refused
		return r, ""
	case proxier.Dropped:
		r.Expect.Outcome = scenarios.NoAnswer
		return r, ""
	}
	r.Expect.Outcome, r.Expect.Sticky = scenarios.Backends, a.Affinity > 0
	for _, b := range a.Backends {
		name := nameByPlan(b.Addr())
		if name == "" {
			return r, fmt.Sprintf("no pod or node has the address %s", b.Addr())
		}
		if who == 0 && a.Source == proxier.KeepSource && nodeOf(b.Addr().String()) != ownNode {
			return r, "the answer does not come back this way"
		}
		if !slices.Contains(r.Expect.Backends, name) {
			r.Expect.Backends = append(r.Expect.Backends, name)
		}
	}
	switch a.Source {
	case proxier.KeepSource:
		r.Expect.Source = scenarios.SourceClient
	case proxier.Masquerade:
		// The node's connections to itself may keep any of its addresses as their source.
		if !slices.Contains(r.Expect.Backends, ownNode) {
			r.Expect.Source = ownNode
		}
	}
	return r, ""
}

// recorder records the errors of a scenario.
type recorder struct {
	testing.TB
	errors []string
}

func (r *recorder) Helper() {}
func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}
func (r *recorder) Skipf(format string, args ...any) { r.Errorf("skipped: "+format, args...) }

// rehearse writes a scenario, reads it back, and plays it on the model. It returns the
// text and the runner's errors. Reported problems of objects are added to the
// expectations.
func rehearse(t testing.TB, s *scenarios.Scenario) (text []byte, complaints []string) {
	play := func() (m *scenarios.Model, complaints []string) {
		text = scenarios.Format(s)
		parsed, err := scenarios.Parse(s.Name+".txtar", text)
		if err != nil {
			return nil, []string{err.Error()}
		}
		m = scenarios.NewModel(parsed)
		r := &recorder{TB: t}
		func() {
			defer func() {
				if p := recover(); p != nil {
					r.Errorf("panic: %v", p)
				}
			}()
			scenarios.Run(r, parsed, m)
		}()
		return m, r.errors
	}
	m, complaints := play()
	if m == nil {
		return text, complaints
	}
	told := map[scenarios.Problem]bool{}
	for _, p := range m.Problems() {
		q := scenarios.Problem{Kind: p.Kind, Namespace: p.Object.Namespace, Name: p.Object.Name, Field: p.Field, Reason: p.Reason}
		if !told[q] {
			told[q] = true
			s.Steps = append(s.Steps, scenarios.Step{Command: q})
		}
	}
	_, complaints = play()
	return text, complaints
}

// report reduces a world's disagreement and fails with a scenario of it.
func report(t testing.TB, w *world, o *Worlds) {
	t.Helper()
	d := w.defect(o)
	if d.what == "panic" && d.flow.Destination.IsValid() && d.reproduce() == nil {
		d.flow = proxier.Flow{} // the defect does not depend on a flow
	}
	if d.reproduce() == nil {
		t.Errorf("seed %d, cannot be reproduced: %s: %s", w.seed, w.found.what, w.found.text)
		return
	}
	d.shrink(time.Now().Add(30 * time.Second))
	found := d.reproduce()
	text, complaints := rehearse(t, d.scenario())
	dir, err := os.MkdirTemp("", "oracle-")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "disagreement.txtar")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	says := strings.Join(complaints, "\n")
	if says == "" {
		says = "nothing. A scenario cannot express what differs; the seed reproduces it."
	}
	t.Errorf("-run='^%s$' -oracle.seed=%d finds a disagreement, written to %s:\n%s: %s\n\n%s\nErrors of the scenario runner: %s",
		t.Name(), w.seed, file, found.what, found.text, text, says)
}
