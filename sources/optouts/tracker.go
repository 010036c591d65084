// SPDX-License-Identifier: Apache-2.0

package optouts

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

// PodAnnotations and NamespaceLabels are what is read of Pods and Namespaces.
var (
	PodAnnotations  = []string{proxier.KeySocketLB, annotationStaticUID}
	NamespaceLabels = []string{proxier.KeySocketLB}
)

// annotationStaticUID is the UID of a static pod in the names of its cgroups. Its Pod has another one.
const annotationStaticUID = "kubernetes.io/config.hash"

// Tracker knows the Pods of a node and the Namespaces. Its methods may be called concurrently.
type Tracker struct {
	reporter proxier.Reporter
	changed  func(proxier.OptOuts)

	mu         sync.Mutex
	pods       map[types.NamespacedName]pod
	namespaces map[string]choice
	// synced says that all Pods, and all Namespaces, are known.
	podsSynced, namespacesSynced bool
	last                         proxier.OptOuts
}

// choice is what an object says.
type choice int

const (
	silent choice = iota
	optOut
	stay
)

// pod is what counts of a Pod.
type pod struct {
	proxier.OptedOutPod
	says        choice
	hostNetwork bool
	ended       bool
}

// New makes a Tracker that calls changed, in order, whenever the opt-outs are others. Values that are not
// understood are reported, and ignored.
func New(reporter proxier.Reporter, changed func(proxier.OptOuts)) *Tracker {
	return &Tracker{reporter: reporter, changed: changed, pods: map[types.NamespacedName]pod{}, namespaces: map[string]choice{}}
}

// OnPod is called for a Pod of this node that is new or has changed.
func (t *Tracker) OnPod(o *v1.Pod) {
	name := types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
	about := proxier.Problem{Kind: "Pod", Object: name, UID: o.UID, Field: "metadata.annotations[" + proxier.KeySocketLB + "]"}
	p := pod{
		OptedOutPod: proxier.OptedOutPod{
			Object: name, UID: o.UID, CgroupUID: cmp.Or(o.Annotations[annotationStaticUID], string(o.UID)),
			Running: o.Status.Phase == v1.PodRunning,
		},
		says: t.read(o.Annotations, about), hostNetwork: o.Spec.HostNetwork,
		ended: o.Status.Phase == v1.PodSucceeded || o.Status.Phase == v1.PodFailed,
	}
	if p.says == optOut && p.hostNetwork {
		about.Reason = proxier.ReasonUnsupported
		about.Message = "a pod in the network namespace of the node cannot opt out of socket load balancing; it is ignored"
		t.reporter.Report(about)
	}
	t.change(func() { t.pods[name] = p })
}

// OnPodDelete is called when a Pod is deleted, or is on another node.
func (t *Tracker) OnPodDelete(o *v1.Pod) {
	t.change(func() { delete(t.pods, types.NamespacedName{Namespace: o.Namespace, Name: o.Name}) })
}

// OnPodsSynced is called once after the first Pods.
func (t *Tracker) OnPodsSynced() { t.change(func() { t.podsSynced = true }) }

// OnNamespace is called for a Namespace that is new or has changed.
func (t *Tracker) OnNamespace(o *v1.Namespace) {
	says := t.read(o.Labels, proxier.Problem{
		Kind: "Namespace", Object: types.NamespacedName{Name: o.Name}, UID: o.UID, Field: "metadata.labels[" + proxier.KeySocketLB + "]",
	})
	t.change(func() {
		if says == silent {
			delete(t.namespaces, o.Name)
		} else {
			t.namespaces[o.Name] = says
		}
	})
}

// OnNamespaceDelete is called when a Namespace is deleted.
func (t *Tracker) OnNamespaceDelete(o *v1.Namespace) {
	t.change(func() { delete(t.namespaces, o.Name) })
}

// OnNamespacesSynced is called once after the first Namespaces.
func (t *Tracker) OnNamespacesSynced() { t.change(func() { t.namespacesSynced = true }) }

// read returns what the annotations or labels of an object say.
func (t *Tracker) read(values map[string]string, about proxier.Problem) choice {
	value, there := values[proxier.KeySocketLB]
	switch {
	case !there:
		return silent
	case value == proxier.SocketLBDisabled:
		return optOut
	case value == proxier.SocketLBEnabled:
		return stay
	}
	about.Reason = proxier.ReasonInvalidObject
	about.Message = fmt.Sprintf("%.32q is neither %q nor %q; it is ignored", value, proxier.SocketLBDisabled, proxier.SocketLBEnabled)
	t.reporter.Report(about)
	return silent
}

func (t *Tracker) change(do func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	do()
	now := t.decide()
	if now.Complete == t.last.Complete && slices.Equal(now.Pods, t.last.Pods) {
		return
	}
	t.last = now
	t.changed(now)
}

// decide is called with mu held.
func (t *Tracker) decide() proxier.OptOuts {
	now := proxier.OptOuts{Complete: t.podsSynced && t.namespacesSynced}
	for _, p := range t.pods {
		if p.hostNetwork || p.ended {
			continue
		}
		switch {
		case p.says == optOut:
			p.Field = "metadata.annotations[" + proxier.KeySocketLB + "]"
		case p.says == silent && t.namespaces[p.Object.Namespace] == optOut:
			p.Field = "metadata.labels[" + proxier.KeySocketLB + "] of its namespace"
		default:
			continue
		}
		now.Pods = append(now.Pods, p.OptedOutPod)
	}
	slices.SortFunc(now.Pods, func(a, b proxier.OptedOutPod) int { return cmp.Compare(a.Object.String(), b.Object.String()) })
	return now
}
