// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestDisturbances: connections that netfilter keeps while addresses move, MTUs change and routes
// flap are kept.
func TestDisturbances(t *testing.T) {
	kernel.NeedsPrograms(t)
	p := Profiles[slices.IndexFunc(Profiles, func(p *Profile) bool { return p.Name == "routed" })]
	w, err := p.Build(t.Context(), lab.NewT(t, p.LabOptions()), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cells := slices.DeleteFunc(p.Cells(), func(c Cell) bool { return c.Kind != Life })
	lost := map[string]Results{}
	w.with(t, ours, func() {
		for _, d := range Disturbances {
			t.Run(d.Name, func(t *testing.T) { lost[d.Name] = w.disturbed(t, cells, d) })
		}
	})
	for _, d := range Disturbances {
		of := lost[d.Name].lost()
		if len(of) == 0 {
			continue
		}
		control := controls()[0]
		w.with(t, control, func() {
			results := w.disturbed(t, of, d)
			for _, c := range of {
				if results[c] != nil {
					t.Logf("%s: %s: lost by %s as well: %v", d.Name, c, control.Title, results[c])
					continue
				}
				t.Errorf("%s: %s: %v", d.Name, c, lost[d.Name][c])
			}
		})
	}
}

func (w *World) disturbed(t *testing.T, cells []Cell, d Disturbance) Results {
	t.Helper()
	cycles := d.Cycles
	if testing.Short() {
		cycles = d.Short
	}
	results, err := w.Disturb(t.Context(), cells, d, cycles)
	if err != nil {
		t.Error(err)
	}
	return results
}

// with runs a program while use does something.
func (w *World) with(t *testing.T, program Program, use func()) {
	t.Helper()
	p, err := w.Start(t.Context(), program)
	if err != nil {
		t.Fatalf("%s: %v", program.Title, err)
	}
	use()
	if err := p.Close(t.Context(), ours); err != nil {
		t.Errorf("%s: %v", program.Title, err)
	}
}
