// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
)

// TestRefused: if the kernel refuses rules of one Service, that is reported once. Its previous rules
// and other Services are not affected. The rules are written as soon as the kernel accepts them.
func TestRefused(t *testing.T) {
	name := proxier.ServicePortName{Port: "p", Protocol: proxier.TCP}
	name.Namespace, name.Name = "shop", "s31"
	bad := chainName(clusterPrefix, &name, "")
	for _, size := range []int{50, 200} {
		for i := range 4 {
			restart, tells := i%2 == 1, i > 1
			t.Run(fmt.Sprintf("%d/restart=%v/generation=%v", size, restart, tells), func(t *testing.T) {
				tools := newSimulated()
				tools.HasGeneration = tells
				n := newNode(t, tools)
				n.Serve(0, size, 2)
				n.MustSync()
				before := contents(t, n.Tools, proxier.IPv4)
				n.Tools.Before = iptablestest.Refusing(bad)
				change := func() {
					for i := range size {
						if i%10 != 7 {
							n.OnEndpointSliceUpdate(nil, endpoints(i, pod(1000+i)))
						}
					}
				}
				if restart {
					n.restart()
					n.Serve(0, size, 2)
				}
				change()
				n.MustSync()
				got := contents(t, n.Tools, proxier.IPv4)
				name := name
				if diff := cmp.Diff(before["nat "+bad], got["nat "+bad]); diff != "" {
					t.Errorf("the refused chain has changed (-before +after):\n%s", diff)
				}
				for _, r := range before["nat "+bad] {
					if to := jumpOf(r); isOfServicePort(to) && len(got["nat "+to]) != 2 {
						t.Errorf("%s has rules %q", to, got["nat "+to])
					}
				}
				if list, wrong := entries(t, n.Tools, proxier.IPv4); len(wrong) > 0 || !slices.ContainsFunc(list, func(r string) bool { return strings.HasSuffix(r, "-j "+chainName(externalPrefix, &name, "")) }) {
					t.Errorf("no rule jumps to the Service's chains; wrong: %q", wrong)
				}
				for i := range size {
					other := name
					other.Name = fmt.Sprintf("s%d", i)
					chain := chainName(clusterPrefix, &other, "")
					if to := chainName(endpointPrefix, &other, pod(1000+i)+":8080"); i%10 != 7 && i%10 != 5 && i != 31 &&
						(jumpOf(got["nat "+chain][len(got["nat "+chain])-1]) != to || len(got["nat "+to]) != 2) {
						t.Fatalf("service %d: rules %q", i, got["nat "+chain])
					}
				}
				for range 2 {
					n.MustFullSync()
				}
				if len(n.Problems) != 1 || n.Problems[0].Object.Name != "s31" || !strings.Contains(n.Problems[0].Message, "no chain like that one") {
					t.Errorf("reported %+v", n.Problems)
				}
				n.Tools.Before = nil
				n.MustFullSync()
				n.Tools.Take()
				n.MustFullSync()
				got = contents(t, n.Tools, proxier.IPv4)
				if to := chainName(endpointPrefix, &name, pod(1031)+":8080"); len(got["nat "+to]) != 2 || len(n.Tools.Take()) > 0 {
					t.Error("the rules are not written although they are accepted now")
				}
			})
		}
	}
}

// TestRefusedNew: a kernel without the match for SCTP refuses the rules of such a Service, even
// without endpoints, and even if all others are adopted from another process.
func TestRefusedNew(t *testing.T) {
	withoutSCTP := func(input string) error {
		if strings.Contains(input, "-m sctp") {
			return &xtables.RestoreError{Line: 2, Output: "no match sctp"}
		}
		return nil
	}
	sctp := func(s *v1.Service) { s.Spec.Ports[0].Protocol = v1.ProtocolSCTP }
	for _, takeOver := range []bool{false, true} {
		n := newNode(t, newSimulated())
		if takeOver {
			n.Serve(0, 30, 2)
			n.MustSync()
			n.restart()
		}
		n.Tools.Before = withoutSCTP
		n.Serve(5, 40, 1)
		n.OnServiceAdd(service(45, sctp))
		n.MustSync()
		n.MustFullSync()
		if len(n.Problems) != 1 || n.Problems[0].Object.Name != "s45" {
			t.Errorf("take-over %v: reported %+v", takeOver, n.Problems)
		}
		want := newNode(t, newSimulated())
		want.Serve(5, 40, 1)
		want.MustSync()
		if diff := cmp.Diff(saved(t, want.Tools, proxier.IPv4), saved(t, n.Tools, proxier.IPv4)); diff != "" {
			t.Errorf("take-over %v: (-want +got):\n%s", takeOver, diff)
		}
	}
}

// TestRefusedByHalf: tables are written one after the other. If one is refused, changes of earlier
// ones are reverted.
func TestRefusedByHalf(t *testing.T) {
	n := newNode(t, newSimulated())
	n.Serve(0, 20, 2)
	n.OnServiceAdd(service(30, nodePort(30500)))
	n.MustSync()
	before := saved(t, n.Tools, proxier.IPv4)
	refused := 0
	n.Tools.Before = func(input string) error {
		filter, nat, both := strings.Cut(input, "*nat\n")
		if !both || !strings.Contains(nat, "shop/s30:p") || !strings.Contains(nat, "DNAT") {
			return nil
		}
		refused++
		if err := n.Tools.Tools.Restore(t.Context(), proxier.IPv4, []byte(filter)); err != nil {
			t.Error(err)
		}
		return &xtables.RestoreError{Line: 2, Output: "not in nat"}
	}
	n.OnEndpointSliceAdd(endpoints(30, pod(1)))
	n.MustSync()
	if refused == 0 || len(n.Problems) != 1 {
		t.Errorf("refused %d times, reported %+v", refused, n.Problems)
	}
	if diff := cmp.Diff(before, saved(t, n.Tools, proxier.IPv4)); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
}
