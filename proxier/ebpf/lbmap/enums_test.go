// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// TestEnumsOfModel: enums of the model that are stored in maps have the same values as in C.
func TestEnumsOfModel(t *testing.T) {
	for _, e := range []struct {
		name     string
		model, c int
	}{
		{"FromPod", int(proxier.FromPod), FromPod},
		{"FromHost", int(proxier.FromHost), FromHost},
		{"FromOutside", int(proxier.FromOutside), FromOutside},
		{"ClusterIP", int(proxier.ClusterIP), KindClusterIP},
		{"LoadBalancer", int(proxier.LoadBalancer), KindLoadBalancer},
		{"ExternalIP", int(proxier.ExternalIP), KindExternalIP},
		{"NodePort", int(proxier.NodePort), KindNodePort},
		{"V4Cluster", int(proxier.V4Cluster), SetV4Cluster},
		{"V4Local", int(proxier.V4Local), SetV4Local},
		{"V6Cluster", int(proxier.V6Cluster), SetV6Cluster},
		{"V6Local", int(proxier.V6Local), SetV6Local},
		{"Sets", int(proxier.Sets), SetsPerService},
		{"word of a set whose connections are rejected", int(EmptySet(proxier.Reject)), VerdictReject},
		{"word of a set whose connections are dropped", int(EmptySet(proxier.Drop)), VerdictDrop},
		{"word of a set that is not in use", UnusedSet, VerdictNone},
		{"reasons with a name", len(ReasonNames), Reasons},
	} {
		if e.model != e.c {
			t.Errorf("%s: %d in Go, %d in C", e.name, e.model, e.c)
		}
	}
	for i, name := range ReasonNames {
		if name == "" {
			t.Errorf("reason %d has no name", i)
		}
	}
	for code := Refusal(RefusalFrontendsFull); code <= RefusalRangesFull; code++ {
		if code.String() == "" || code.String() == Refusal(99).String() {
			t.Errorf("refusal %d has no text", code)
		}
	}
}

// TestWords: a word contains the values that it was made of.
func TestWords(t *testing.T) {
	for _, w := range []struct {
		base uint32
		size int
	}{{0, 1}, {1, 1 << 20}, {1<<32 - 1, 7}} {
		if base, size := SplitSetWord(SetWord(w.base, w.size)); base != w.base || size != w.size {
			t.Errorf("%+v was decoded as %d, %d", w, base, size)
		}
	}
	for _, v := range []proxier.Verdict{proxier.Reject, proxier.Drop} {
		base, size := SplitSetWord(EmptySet(v))
		if got, ok := VerdictOf(base); size != 0 || !ok || got != v {
			t.Errorf("%v was decoded as %v, %v, size %d", v, got, ok, size)
		}
	}
	if _, ok := VerdictOf(UnusedSet); ok {
		t.Error("a set that is not in use has a verdict")
	}
}
