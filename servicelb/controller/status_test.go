// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tandem-proxy/tandem/servicelb"
)

// ingress is what ServiceLB writes.
func ingress(addresses ...string) (list []v1.LoadBalancerIngress) {
	for _, a := range addresses {
		list = append(list, v1.LoadBalancerIngress{IP: a, IPMode: new(v1.LoadBalancerIPModeVIP)})
	}
	return list
}

// TestLoserFirst: an address is in no two statuses, even if the one that is to lose it cannot be written.
func TestLoserFirst(t *testing.T) {
	for _, fails := range []bool{false, true} {
		loser, winner, third := newService("loser", 80), newService("winner", 80), newService("third", 81)
		loser.Status.LoadBalancer.Ingress = ingress("10.0.0.1")
		winner.Annotations = map[string]string{servicelb.AnnotationPriority: "1"}
		w := start(t, Options{}, loser, winner, third)
		var order []string
		w.client.PrependReactor("update", "services", func(a clienttesting.Action) (bool, runtime.Object, error) {
			s := a.(clienttesting.UpdateAction).GetObject().(*v1.Service)
			order = append(order, s.Name)
			if fails && s.Name == "loser" {
				return true, nil, errors.New("the API server is gone")
			}
			return false, nil, nil
		})
		list := servicelb.Decide(servicelb.Objects{Services: []*v1.Service{loser, winner}, Nodes: []*v1.Node{newNode("n1", "10.0.0.1")}}, servicelb.Options{})
		list = append(list, servicelb.Outcome{Service: third, Ingress: ingress("10.0.0.2")})
		err := w.write(t.Context(), list)
		slices.Sort(order[1:])
		if want := []string{"loser", "third", "winner"}; !fails && (err != nil || !slices.Equal(order, want)) {
			t.Errorf("written are %v, %v; want %v", order, err, want)
		}
		if want := []string{"loser", "third"}; fails && (err == nil || !slices.Equal(order, want)) {
			t.Errorf("where the first fails: written are %v, %v; want %v", order, err, want)
		}
	}
}

// TestLeaveAlone: the pause before a status is written again that another controller overwrites doubles up to a bound, and is short again
// after a long time.
func TestLeaveAlone(t *testing.T) {
	s := newService("a", 80)
	w := start(t, Options{}, s)
	was := &written{version: "1", ingress: ingress("10.0.0.1")}
	s.Status.LoadBalancer.Ingress = ingress("203.0.113.9")
	for i, want := range []time.Duration{firstPause, 2 * firstPause, 4 * firstPause} {
		s.ResourceVersion = string(rune('b' + i))
		before := time.Now()
		for range 2 { // the second look is at the same version
			if !w.leaveAlone(t.Context(), s, was) {
				t.Fatal("a status is written again at once")
			}
		}
		if pause := was.until.Sub(before); pause < want || pause > want+patience {
			t.Errorf("overwritten for the %d. time: a pause of %v, want %v", i+1, pause, want)
		}
		if was.overwritten != i+1 {
			t.Errorf("overwritten %d times, want %d", was.overwritten, i+1)
		}
		was.until = before // the pause has passed
	}
	was.overwritten = 1000
	s.ResourceVersion = "y"
	if w.leaveAlone(t.Context(), s, was); time.Until(was.until) > maxPause {
		t.Errorf("a pause of %v, more than %v", time.Until(was.until), maxPause)
	}
	was.until, s.ResourceVersion = time.Now().Add(-3*maxPause), "z"
	if w.leaveAlone(t.Context(), s, was); was.overwritten != 1 {
		t.Errorf("after a long time: overwritten %d times", was.overwritten)
	}
	s.Status.LoadBalancer.Ingress, s.ResourceVersion, was.until = was.ingress, "zz", time.Time{}
	if w.leaveAlone(t.Context(), s, was) {
		t.Error("the status has what was written, and is left alone")
	}
}

// TestTellOnce: what a Service lacks, warnings and ignored annotations are told of once each, also while one of the others changes.
func TestTellOnce(t *testing.T) {
	w := start(t, Options{}, newService("a", 80))
	lacks := func(texts ...string) (list []servicelb.Reason) {
		for _, text := range texts {
			list = append(list, servicelb.Reason{Code: servicelb.PortTaken, Message: text})
		}
		return list
	}
	for _, step := range []struct{ reasons, warnings, want []string }{
		{nil, []string{"w"}, []string{"PortTaken w", "IgnoredAnnotation"}},
		{[]string{"r"}, []string{"w"}, []string{"PortTaken r"}},
		{[]string{"r", "q"}, []string{"w"}, []string{"PortTaken r; q"}},
		{nil, []string{"w"}, nil},
		{nil, nil, nil},
		{nil, []string{"w"}, []string{"PortTaken w"}},
	} {
		w.tell(&servicelb.Outcome{Service: newService("a", 80), Reasons: lacks(step.reasons...), Warnings: lacks(step.warnings...), Ignored: []string{"tolerations"}})
		var got []string
		for len(w.events) > 0 {
			got = append(got, <-w.events)
		}
		if !slices.EqualFunc(got, step.want, strings.Contains) {
			t.Errorf("reasons %q, warnings %q: Events %q, want %q", step.reasons, step.warnings, got, step.want)
		}
	}
}

// TestNoMode: a status without ipMode is another one than ours.
func TestNoMode(t *testing.T) {
	bare := []v1.LoadBalancerIngress{{IP: "10.0.0.1"}}
	if sameIngress(bare, ingress("10.0.0.1")) || sameIngress(ingress("10.0.0.1"), bare) || !sameIngress(ingress("10.0.0.1"), ingress("10.0.0.1")) {
		t.Error("a status without ipMode counts as one with it, or one with it does not")
	}
}

// TestTypeChanged: a Service that is of no type LoadBalancer any more loses what its status had, and the finalizers of K3s' controller.
func TestTypeChanged(t *testing.T) {
	s := newService("a", 80)
	s.Finalizers = append([]string{"example.com/other"}, servicelb.Finalizers...)
	w := start(t, Options{}, newNode("n1", "10.0.0.1"), s)
	w.run()
	w.has("a", "10.0.0.1")
	s, err := w.client.CoreV1().Services("ns").Get(t.Context(), "a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.Spec.Type, s.Spec.LoadBalancerClass = v1.ServiceTypeClusterIP, nil
	if _, err := w.client.CoreV1().Services("ns").Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "the status to be empty", func() error {
		s, err := w.client.CoreV1().Services("ns").Get(t.Context(), "a", metav1.GetOptions{})
		if err == nil && (len(s.Status.LoadBalancer.Ingress) > 0 || len(s.Status.Conditions) > 0 || len(s.Finalizers) != 1) {
			err = errors.New(s.String())
		}
		return err
	})
}
