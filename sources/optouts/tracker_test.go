// SPDX-License-Identifier: Apache-2.0

package optouts

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

// Pods are in namespace shop, and their UIDs are their names in capitals.
func makePod(name, value string, change ...func(*v1.Pod)) *v1.Pod {
	p := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(strings.ToUpper(name))},
		Status:     v1.PodStatus{Phase: v1.PodRunning},
	}
	if value != "none" {
		p.Annotations = map[string]string{proxier.KeySocketLB: value}
	}
	for _, f := range change {
		f(p)
	}
	return p
}

func makeNamespace(value string) *v1.Namespace {
	n := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", UID: "NS"}}
	if value != "none" {
		n.Labels = map[string]string{proxier.KeySocketLB: value}
	}
	return n
}

// fixture has what a Tracker told last, and the problems it reported.
type fixture struct {
	*Tracker
	told     string
	times    int
	problems []string
}

func newFixture() *fixture {
	f := &fixture{}
	f.Tracker = New(proxier.ReporterFunc(func(p proxier.Problem) {
		f.problems = append(f.problems, fmt.Sprintf("%s %s %s %s %s: %s", p.Kind, p.Object, p.UID, p.Reason, p.Field, p.Message))
	}), func(o proxier.OptOuts) {
		f.times++
		var list []string
		for _, p := range o.Pods {
			by := "annotation"
			if strings.Contains(p.Field, "namespace") {
				by = "label"
			}
			list = append(list, fmt.Sprintf("%s/%s by %s", p.Object.Name, p.CgroupUID, by))
		}
		f.told = strings.Join(list, ", ")
		if o.Complete {
			f.told += " and no more"
		}
	})
	return f
}

// TestDecision: what a Pod says counts before what its Namespace says.
func TestDecision(t *testing.T) {
	const byPod, byNamespace = "a/A by annotation", "a/A by label"
	for _, tt := range []struct{ pod, namespace, want string }{
		{"none", "none", ""},
		{"none", "enabled", ""},
		{"none", "disabled", byNamespace},
		{"none", "", ""},
		{"enabled", "none", ""},
		{"enabled", "disabled", ""},
		{"disabled", "none", byPod},
		{"disabled", "enabled", byPod},
		{"disabled", "disabled", byPod},
		{"disabled", "Disabled", byPod},
		{"false", "disabled", byNamespace},
		{"", "disabled", byNamespace},
		{"Disabled", "none", ""},
	} {
		for _, first := range []string{"pod", "namespace"} {
			f := newFixture()
			if first == "pod" {
				f.OnPod(makePod("a", tt.pod))
				f.OnNamespace(makeNamespace(tt.namespace))
			} else {
				f.OnNamespace(makeNamespace(tt.namespace))
				f.OnPod(makePod("a", tt.pod))
			}
			if f.told != tt.want {
				t.Errorf("pod %q, namespace %q, %s first: %q opted out, want %q", tt.pod, tt.namespace, first, f.told, tt.want)
			}
		}
	}
}

// TestChanges: what is told follows each change, and is told once.
func TestChanges(t *testing.T) {
	f := newFixture()
	step := func(what, want string, do func()) {
		t.Helper()
		times := f.times
		do()
		if f.told != want {
			t.Errorf("%s: %q opted out, want %q", what, f.told, want)
		}
		if f.times > times+1 {
			t.Errorf("%s: told %d times", what, f.times-times)
		}
	}
	ended := func(p *v1.Pod) { p.Status.Phase = v1.PodSucceeded }
	step("a pod", "a/A by annotation", func() { f.OnPod(makePod("a", "disabled")) })
	step("another one", "a/A by annotation", func() { f.OnPod(makePod("b", "none")) })
	step("pods synced", "a/A by annotation", f.OnPodsSynced)
	step("the namespace", "a/A by annotation, b/B by label", func() { f.OnNamespace(makeNamespace("disabled")) })
	step("namespaces synced", "a/A by annotation, b/B by label and no more", f.OnNamespacesSynced)
	step("the pod stays", "b/B by label and no more", func() { f.OnPod(makePod("a", "enabled")) })
	step("the pod is silent", "a/A by label, b/B by label and no more", func() { f.OnPod(makePod("a", "none")) })
	step("the pod ends", "b/B by label and no more", func() { f.OnPod(makePod("a", "none", ended)) })
	step("it is made again", "a/NEW by label, b/B by label and no more", func() {
		f.OnPod(makePod("a", "none", func(p *v1.Pod) { p.UID = "NEW" }))
	})
	step("it is deleted", "b/B by label and no more", func() { f.OnPodDelete(makePod("a", "none")) })
	step("the label goes", " and no more", func() { f.OnNamespace(makeNamespace("none")) })
	step("the label is back", "b/B by label and no more", func() { f.OnNamespace(makeNamespace("disabled")) })
	step("the namespace is deleted", " and no more", func() { f.OnNamespaceDelete(makeNamespace("none")) })
	times := f.times
	f.OnPod(makePod("b", "none"))
	f.OnNamespace(makeNamespace("enabled"))
	if f.times != times {
		t.Error("told without a change")
	}
}

// TestStaticPods: the cgroups of a static pod have another UID than its Pod.
func TestStaticPods(t *testing.T) {
	f := newFixture()
	f.OnPod(makePod("a", "disabled", func(p *v1.Pod) { p.Annotations[annotationStaticUID] = "hash" }))
	if want := "a/hash by annotation"; f.told != want {
		t.Errorf("%q opted out, want %q", f.told, want)
	}
}

// TestProblems: values that are not understood are reported with the object, the key and the accepted values, and
// so is a pod that cannot opt out.
func TestProblems(t *testing.T) {
	f := newFixture()
	f.OnPod(makePod("a", "off"))
	f.OnNamespace(makeNamespace("true"))
	f.OnPod(makePod("b", "disabled", func(p *v1.Pod) { p.Spec.HostNetwork = true }))
	f.OnNamespace(makeNamespace("disabled")) // pods in the node's network namespace are left out silently
	want := []string{
		`Pod shop/a A InvalidObject metadata.annotations[tandem-proxy.dev/socket-lb]: "off" is neither "disabled" nor "enabled"; it is ignored`,
		`Namespace /shop NS InvalidObject metadata.labels[tandem-proxy.dev/socket-lb]: "true" is neither "disabled" nor "enabled"; it is ignored`,
		`Pod shop/b B Unsupported metadata.annotations[tandem-proxy.dev/socket-lb]: a pod in the network namespace of the node cannot opt out of socket load balancing; it is ignored`,
	}
	if d := cmp.Diff(want, f.problems); d != "" {
		t.Errorf("problems (-want +got):\n%s", d)
	}
	if want := "a/A by label"; f.told != want {
		t.Errorf("%q opted out, want %q", f.told, want)
	}
}
