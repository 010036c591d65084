// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/proxier"
)

var begin = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// recorder writes Events down.
type recorder struct{ list []string }

func (r *recorder) Eventf(ref *v1.ObjectReference, kind, reason, action, note string, args ...any) {
	r.list = append(r.list, fmt.Sprintf("%s %s %s/%s uid=%s: %s %s %s", ref.APIVersion, ref.Kind, ref.Namespace, ref.Name, ref.UID, kind, reason, fmt.Sprintf(note, args...)))
}

type fixture struct {
	*Reporter
	events recorder
	clock  *clocktesting.FakePassiveClock
	log    *strings.Builder
	counts map[string]int
}

func newFixture() *fixture {
	f := &fixture{clock: clocktesting.NewFakePassiveClock(begin), log: &strings.Builder{}, counts: map[string]int{}}
	ctx := klog.NewContext(context.Background(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(f.log))))
	f.Reporter = New(ctx, Options{
		NodeName: "node1", Recorder: &f.events, Clock: f.clock,
		Counter: func(kind, reason string) { f.counts[kind+"/"+reason]++ },
	})
	return f
}

func (f *fixture) after(d time.Duration) { f.clock.SetTime(begin.Add(d)) }

func (f *fixture) logged() int { return strings.Count(f.log.String(), "\n") }

func problem(object, message string) proxier.Problem {
	return proxier.Problem{
		Kind: "Service", Object: types.NamespacedName{Namespace: "ns", Name: object},
		Field: "spec.ports[0]", Reason: proxier.ReasonInvalidObject, Message: message,
	}
}

func TestOneProblemIsToldEverywhere(t *testing.T) {
	f := newFixture()
	f.Report(problem("a", "0 is no port"))
	f.Report(proxier.Problem{Kind: "Node", Reason: proxier.ReasonFlowsNotClosed, Message: "m"})
	f.Report(proxier.Problem{Kind: "EndpointSlice", Object: types.NamespacedName{Namespace: "ns", Name: "s"}, Reason: proxier.ReasonInvalidObject, Message: "100% %s"})
	f.Report(proxier.Problem{Kind: "Pod", Object: types.NamespacedName{Namespace: "ns", Name: "p"}, UID: "1", Field: "f", Reason: proxier.ReasonInvalidObject, Message: "m"})
	f.Report(proxier.Problem{Kind: "Namespace", Object: types.NamespacedName{Name: "ns"}, UID: "2", Field: "f", Reason: proxier.ReasonInvalidObject, Message: "m"})
	f.Report(proxier.Problem{Kind: "File", Object: types.NamespacedName{Name: "/m/a.yaml"}, Reason: proxier.ReasonInvalidFile, Message: "line 1"})
	want := []string{
		"v1 Service ns/a uid=: Warning InvalidObject spec.ports[0]: 0 is no port",
		"v1 Node /node1 uid=node1: Warning FlowsNotClosed m",
		"discovery.k8s.io/v1 EndpointSlice ns/s uid=: Warning InvalidObject 100% %s",
		"v1 Pod ns/p uid=1: Warning InvalidObject f: m",
		"v1 Namespace /ns uid=2: Warning InvalidObject f: m",
	}
	if d := cmp.Diff(want, f.events.list); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
	for _, text := range []string{
		`err="0 is no port" kind="Service" object="ns/a" field="spec.ports[0]" reason="InvalidObject"`,
		`err="m" kind="Node" reason="FlowsNotClosed"`,
		`err="line 1" kind="File" file="/m/a.yaml" reason="InvalidFile"`,
	} {
		if !strings.Contains(f.log.String(), text) {
			t.Errorf("the log has no %s:\n%s", text, f.log)
		}
	}
}

func TestRepeatsAreCountedOnly(t *testing.T) {
	f := newFixture()
	for range 3 {
		f.Report(problem("a", "m"))
	}
	f.after(repeatAfter - 1)
	f.Report(problem("a", "m"))
	if f.logged() != 1 || len(f.events.list) != 1 {
		t.Errorf("logged %d times and in %d Events, want once", f.logged(), len(f.events.list))
	}
	f.after(repeatAfter)
	f.Report(problem("a", "m"))
	if f.logged() != 2 {
		t.Errorf("logged %d times, want twice after %v", f.logged(), repeatAfter)
	}
	if d := cmp.Diff(map[string]int{"Service/InvalidObject": 5}, f.counts); d != "" {
		t.Errorf("counts (-want +got):\n%s", d)
	}
}

func TestOneObjectCannotFlood(t *testing.T) {
	f := newFixture()
	for i := range 1000 {
		f.Report(problem("hostile", fmt.Sprint(i)))
	}
	if f.logged() != objectBurst {
		t.Errorf("logged %d, want %d", f.logged(), objectBurst)
	}
	f.Report(problem("other", "m"))
	if f.logged() != objectBurst+1 {
		t.Error("another object's problem was not reported")
	}
	if want := fmt.Sprintf("suppressed=%d", 1000-objectBurst); !strings.Contains(f.log.String(), want) {
		t.Errorf("the log does not say %s", want)
	}
	f.after(2 * objectRefill)
	for i := range 1000 {
		f.Report(problem("hostile", fmt.Sprint("again ", i)))
	}
	if want := objectBurst + 1 + 2; f.logged() != want {
		t.Errorf("logged %d after two refills, want %d", f.logged(), want)
	}
}

func TestAllObjectsCannotFlood(t *testing.T) {
	f := newFixture()
	for i := range 3 * maxRemembered {
		f.Report(problem(fmt.Sprint(i), "m"))
	}
	if f.logged() != allBurst {
		t.Errorf("logged %d, want %d", f.logged(), allBurst)
	}
	// Each reported problem is a new one, long after the others.
	for i := range 3 * maxRemembered {
		f.after(time.Duration(i) * allRefill)
		f.Report(problem(fmt.Sprint("b", i), "m"))
	}
	if len(f.objects) > maxRemembered || len(f.reported) > maxRemembered {
		t.Errorf("remembers %d objects and %d problems, want at most %d", len(f.objects), len(f.reported), maxRemembered)
	}
}

func TestTextsAreShort(t *testing.T) {
	f := newFixture()
	p := problem("a", strings.Repeat("ä", 100_000))
	p.Field = strings.Repeat("x", 100_000)
	f.Report(p)
	if n := len(f.log.String()); n > 2*maxNote {
		t.Errorf("logged %d bytes", n)
	}
	_, note, _ := strings.Cut(f.events.list[0], "InvalidObject ")
	if len(note) > maxNote || !utf8.ValidString(note) || !strings.HasSuffix(note, "…") {
		t.Errorf("note of %d bytes: %q", len(note), note)
	}
}

func TestLabelsAreBounded(t *testing.T) {
	f := newFixture()
	for i := range 10 {
		f.Report(proxier.Problem{Kind: fmt.Sprint("Kind", i), Reason: fmt.Sprint("Reason", i)})
	}
	if d := cmp.Diff(map[string]int{"Other/Other": 10}, f.counts); d != "" {
		t.Errorf("counts (-want +got):\n%s", d)
	}
	if len(f.events.list) != 0 {
		t.Errorf("events about unknown kinds: %q", f.events.list)
	}
}
