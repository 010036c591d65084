// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// observer is a Cluster that knows only the results of calls, like on a real network.
type observer struct {
	list []Observation
}

func (o *observer) Configure(context.Context, Config) error                         { return nil }
func (o *observer) Apply(context.Context, []ObjectChange) error                     { return nil }
func (o *observer) Announce(context.Context, netip.Prefix, []string) error          { return nil }
func (o *observer) Address(context.Context, string, netip.Addr, bool) error         { return nil }
func (o *observer) Override(context.Context, string, proxier.BackendOverride) error { return nil }
func (o *observer) Restart(context.Context, string) error                           { return nil }
func (o *observer) Reach(context.Context, Probe) (next Observation, err error) {
	next, o.list = o.list[0], o.list[1:]
	return next, nil
}

// failures is a testing.TB that records failures.
type failures struct {
	testing.TB
	list    []string
	skipped bool
}

func (f *failures) Helper() {}
func (f *failures) Errorf(format string, args ...any) {
	f.list = append(f.list, fmt.Sprintf(format, args...))
}
func (f *failures) Skipf(string, ...any) { f.skipped = true }

func saw(server, source string) Answer {
	return Answer{Server: server, Source: netip.MustParseAddr(source)}
}

func answers(list ...Answer) Observation { return Observation{Answers: list} }

func failed(list ...Failure) Observation { return Observation{Failures: list} }

func TestRunCompares(t *testing.T) {
	const (
		node1 = "172.18.0.1"
		node2 = "172.18.0.2"
		web1  = "10.244.1.1"
		c     = "198.51.100.1"
	)
	for _, test := range []struct {
		name, script string
		observed     []Observation
		want         string // empty for a pass
	}{
		{"backends", "reach client c -> node1:80 : backends web1,web2 source client", []Observation{answers(saw("web1", c), saw("web2", c), saw("web1", c))}, ""},
		{"one does not answer", "reach client c -> node1:80 : backends web1,web2", []Observation{answers(saw("web1", c), saw("web1", c))}, "not all backends answered"},
		{"one too many", "reach client c -> node1:80 : backends web1", []Observation{answers(saw("web1", c), saw("web2", c))}, "web2 is not an expected backend"},
		{"a call that failed", "reach client c -> node1:80 : backends web1", []Observation{{Answers: []Answer{saw("web1", c)}, Failures: []Failure{TimedOut}}}, "a call failed"},
		{"wrongly masqueraded", "reach client c -> node1:80 : backends web1 source client", []Observation{answers(saw("web1", node1))}, "web1 saw source 172.18.0.1"},
		{"wrongly not masqueraded", "reach client c -> node2:80 : backends web1 source node2", []Observation{answers(saw("web1", c))}, "web1 saw source 198.51.100.1"},
		{"not masqueraded to a backend on that node", "reach client c -> node1:80 : backends web1 source node1", []Observation{answers(saw("web1", c))}, ""},
		{"masqueraded as another node", "reach client c -> node1:80 : backends web1 source node1", []Observation{answers(saw("web1", node2))}, "web1 saw source"},
		{"masqueraded as another address of the node", "reach client c -> node1:80 : backends web1 source node1", []Observation{answers(saw("web1", "10.244.1.254"))}, ""},
		{"masqueraded as an added address", "address add node1 203.0.113.1\nreach client c -> node1:80 : backends web1 source node1", []Observation{answers(saw("web1", "203.0.113.1"))}, ""},
		{"any source", "reach client c -> node1:80 : backends web1 source any", []Observation{answers(saw("web1", node2))}, ""},
		{"a source that may be any", "reach client c -> node1:80 : backends web1 source client", []Observation{answers(Answer{Server: "web1"})}, "web1 saw source anything"},
		{"hairpin", "reach pod web1 -> node1:80 : backends web1,web2 source client", []Observation{answers(saw("web1", node1), saw("web2", web1))}, ""},
		{"sticky", "reach client c -> node1:80 : backends web1,web2 sticky", []Observation{answers(saw("web2", c), saw("web2", c))}, ""},
		{"not sticky", "reach client c -> node1:80 : backends web1,web2 sticky", []Observation{answers(saw("web2", c), saw("web1", c))}, "not the same one every time"},
		{"sticky to another one", "reach client c -> node1:80 : backends web1,web2 sticky=x\nreach client c -> node1:80 : backends web1,web2 sticky=x",
			[]Observation{answers(saw("web2", c)), answers(saw("web1", c))}, "x.txtar:11: it was web2 before"},
		{"refused", "reach client c -> node1:80 : refused", []Observation{failed(ConnectionRefused, ConnectionRefused)}, ""},
		{"timeout instead of refused", "reach client c -> node1:80 : refused", []Observation{failed(TimedOut)}, "a call failed in another way"},
		{"not permitted instead of refused", "reach client c -> node1:80 : refused", []Observation{failed(NotPermitted)}, "a call failed in another way"},
		{"sometimes refused", "reach client c -> node1:80 : refused", []Observation{{Answers: []Answer{saw("web1", c)}, Failures: []Failure{ConnectionRefused}}}, "there was an answer"},
		{"no answer", "reach client c -> node1:80 : no-answer", []Observation{failed(TimedOut)}, ""},
		{"no answer at the socket", "reach client c -> node1:80 : no-answer", []Observation{failed(NotPermitted)}, ""},
		{"refused instead of no answer", "reach client c -> node1:80 : no-answer", []Observation{failed(ConnectionRefused)}, "a call failed in another way"},
		{"passes to no node", "reach client c -> 203.0.113.10:80 : passes", []Observation{failed(TimedOut)}, ""},
		{"passes to no node, and is refused", "reach client c -> 203.0.113.10:80 : passes", []Observation{failed(ConnectionRefused)}, "a call failed in another way"},
		{"passes to the owner", "reach client c -> node1:80 : passes", []Observation{failed(ConnectionRefused)}, ""},
		{"passes to a listener of the owner", "reach client c -> node1:80 : passes", []Observation{answers(saw("node1", c))}, ""},
		{"passes to a backend", "reach client c -> node1:80 : passes", []Observation{answers(saw("web1", c))}, "another endpoint answered"},
		{"passes to a loopback", "reach pod web1 -> 127.0.0.1:80 : passes", []Observation{failed(ConnectionRefused)}, ""},
		{"nothing observed", "reach client c -> node1:80 : refused", []Observation{{}}, "nothing was observed"},
		{"known to pass", "reach client c -> node1:80 : refused", []Observation{{Failures: []Failure{ConnectionRefused}, Path: Passed}}, "no proxy handled the call"},
		{"known not to pass", "reach client c -> node1:80 : passes", []Observation{{Failures: []Failure{ConnectionRefused}, Path: Proxied}}, "a proxy handled the call"},
		{"flow", "flow f client c -> node1:80 : backends web1,web2\nflow f : same", []Observation{answers(saw("web2", c)), answers(saw("web2", c))}, ""},
		{"flow changes its backend", "flow f client c -> node1:80 : backends web1,web2\nflow f : same", []Observation{answers(saw("web2", c)), answers(saw("web1", c))}, "x.txtar:11: web1 is not an expected backend"},
		{"flow that ends", "flow f client c -> node1:80 : backends web1\nflow f : refused", []Observation{answers(saw("web1", c)), failed(ConnectionRefused)}, ""},
		{"texts without tables", "healthcheck node1 default/web none\nproblem Service default/web - Conflict\nreach client c -> node1:80 : refused", []Observation{failed(ConnectionRefused)}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			s, err := Parse("x.txtar", []byte(strings.Replace(head, "client c\n", "pod web2 node2\nclient c\n", 1)+test.script))
			if err != nil {
				t.Fatal(err)
			}
			f := &failures{TB: t}
			Run(f, s, &observer{list: test.observed})
			switch got := strings.Join(f.list, "\n"); {
			case test.want == "" && got != "":
				t.Errorf("failed: %s", got)
			case !strings.Contains(got, test.want), test.want != "" && len(f.list) != 1:
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// sctpless supports all calls except those over SCTP.
type sctpless struct {
	observer
	calls int
}

func (o *sctpless) Reach(_ context.Context, p Probe) (Observation, error) {
	if p.Protocol == proxier.SCTP {
		return Observation{}, fmt.Errorf("no SCTP in this kernel: %w", errors.ErrUnsupported)
	}
	o.calls++
	return failed(TimedOut), nil
}

func TestRunLeavesOutWhatIsUnsupported(t *testing.T) {
	const sctp = "reach client c -> node1:80/sctp : refused\nflow f pod web1 -> node1:80/sctp : backends web1\nflow f : same\n"
	for _, test := range []struct {
		script   string
		calls    int
		skipped  bool
		failures int
	}{
		{sctp, 0, true, 0},
		{sctp + "reach client c -> node1:80 : refused\n", 1, false, 1},
	} {
		s, err := Parse("x.txtar", []byte(head+test.script))
		if err != nil {
			t.Fatal(err)
		}
		f, o := &failures{TB: t}, &sctpless{}
		Run(f, s, o)
		if o.calls != test.calls || f.skipped != test.skipped || len(f.list) != test.failures {
			t.Errorf("%d calls, skipped: %t, failures: %q", o.calls, f.skipped, f.list)
		}
	}
}

func TestRunWantsEveryProblemNamed(t *testing.T) {
	const text = head + `apply a.yaml

-- a.yaml --
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIPs: [10.96.0.300]}
`
	for script, want := range map[string]string{
		text: "unexpected problem: Service default/web",
		strings.Replace(text, "apply a.yaml\n", "apply a.yaml\nproblem Service default/web spec.clusterIPs[0] InvalidObject\n", 1): "",
		strings.Replace(text, "apply a.yaml\n", "apply a.yaml\nproblem Service default/web spec.clusterIPs[0] Conflict\n", 1):      "it was not reported",
	} {
		s, err := Parse("x.txtar", []byte(script))
		if err != nil {
			t.Fatal(err)
		}
		f := &failures{TB: t}
		Run(f, s, NewModel(s))
		if (len(f.list) == 0) != (want == "") || want != "" && !slices.ContainsFunc(f.list, func(l string) bool { return strings.Contains(l, want) }) {
			t.Errorf("got %q, want %q", f.list, want)
		}
	}
}

// The Model rejects scenarios that no tier can fulfil.
func TestModelRefusesTheImpossible(t *testing.T) {
	const objects = `

-- a.yaml --
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIPs: [10.96.0.10], ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [ADDRESS]}]
`
	for _, test := range []struct{ address, script, want string }{
		{"10.244.9.9", "apply a.yaml\nreach pod web1 -> 10.96.0.10:80 : backends web1", "endpoint 10.244.9.9:8080 belongs to no pod or node"},
		{"10.244.1.1", "config detectLocal=none\napply a.yaml\nreach client c -> 10.96.0.10:80 via node2 : backends web1", "the reply of web1 to c bypasses node2"},
	} {
		s, err := Parse("x.txtar", []byte(head+test.script+strings.Replace(objects, "ADDRESS", test.address, 1)))
		if err != nil {
			t.Fatal(err)
		}
		f := &failures{TB: t}
		Run(f, s, NewModel(s))
		if len(f.list) != 1 || !strings.Contains(f.list[0], test.want) {
			t.Errorf("got %q, want %q", f.list, test.want)
		}
	}
}
