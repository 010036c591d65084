// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

// TestScenarios writes scenarios about which table and oracle agree. They must pass.
func TestScenarios(t *testing.T) {
	told := 0
	for seed := range uint64(60) {
		g := newGenerator(seed)
		d := defect{what: "answer", h: history{facts: g.facts()}}
		d.h.policy, d.h.settings = g.policy()
		p := d.player()
		for i := range 1 + g.IntN(4) {
			st := g.next(Small, p, i == 0)
			d.h.steps = append(d.h.steps, st)
			p.play(st)
		}
		c := p.cluster()
		d.flow = pick(g, simplerFlows(g.flow(c.Frontends(), c), c.Facts.LocalAddrs)[:3]...)
		s := d.scenario()
		text, complaints := rehearse(t, s)
		if len(s.Notes) > 0 {
			continue // it is not the same
		}
		told++
		if len(complaints) > 0 {
			t.Fatalf("seed %d:\n%s\nErrors of the scenario runner: %s", seed, text, strings.Join(complaints, "\n"))
		}
	}
	t.Logf("%d scenarios are complete", told)
	if told < 10 {
		t.Errorf("only %d scenarios are complete", told)
	}
}

// TestShrink falsifies the oracle and checks how far a large history is reduced.
func TestShrink(t *testing.T) {
	for _, tt := range []struct {
		name                       string
		spoil                      wrongAnswer
		services, slices, backends int
	}{
		{"a NodePort that refuses", func(a *Answer) {
			if a.Kind == proxier.NodePort && a.Outcome == proxier.Forward {
				a.Outcome = proxier.Rejected
			}
		}, 1, 1, 1},
		{"a ClusterIP with two backends that keeps silent", func(a *Answer) {
			if a.Kind == proxier.ClusterIP && len(a.Backends) > 1 {
				a.Outcome = proxier.Dropped
			}
		}, 1, 1, 2},
		{"an address that two claim and none gets", func(a *Answer) {
			if len(a.Rivals) > 0 && a.Rivals[0].NamespacedName != a.Owner.NamespacedName {
				*a = Answer{Origin: a.Origin}
			}
		}, 2, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o, w := Worlds{Steps: 15, Flows: 60, Events: Small, spoil: tt.spoil}, &world{}
			for seed := uint64(1); w.found == nil || w.found.what != "answer"; seed++ {
				w = o.play(seed)
			}
			d := w.defect(&o)
			d.shrink(time.Now().Add(time.Minute))
			if len(d.h.steps) != 1 || d.proxied {
				t.Errorf("%d steps, with a proxier: %t; want one step without", len(d.h.steps), d.proxied)
			}
			services, slices, backends := 0, 0, 0
			for _, st := range d.h.steps {
				for _, e := range st.events {
					if e.service != nil {
						services++
						if n := len(e.service.Spec.Ports); n > 1 {
							t.Errorf("%d ports are left", n)
						}
					} else {
						slices++
						backends += len(e.slice.Endpoints) * len(e.slice.Ports)
					}
				}
			}
			s := d.scenario()
			text, complaints := rehearse(t, s)
			if services != tt.services || slices != tt.slices || backends != tt.backends {
				t.Errorf("%d Services, %d slices, %d backends are left; want %d, %d, %d", services, slices, backends, tt.services, tt.slices, tt.backends)
			}
			// The runner agrees with the table, not with the falsified oracle.
			if n := bytes.Count(text, []byte("\n")); n > 70 || len(s.Notes) > 0 || len(complaints) != 1 {
				t.Errorf("%d lines, notes %q, errors %q", n, s.Notes, complaints)
			}
			if t.Failed() {
				t.Logf("%s", text)
			}
		})
	}
}
