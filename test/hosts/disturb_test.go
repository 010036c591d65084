// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestDisturbances: connections that netfilter keeps while addresses move, MTUs change, routes flap and damaged packets
// arrive are kept.
func TestDisturbances(t *testing.T) {
	kernel.NeedsPrograms(t)
	disturb(t, "routed", append(slices.Clone(Disturbances), Damage)...)
}

// TestDamage: nor does damage from the profiles' tunnels end them.
func TestDamage(t *testing.T) {
	kernel.NeedsPrograms(t)
	for i, p := range Profiles {
		if slices.Contains([]string{"vxlan", "l3-tunnel", "ipip", "gre", "sit", "geneve", "wireguard", "vlan"}, p.Name) && p.chosen(i) {
			t.Run(p.Name, func(t *testing.T) { disturb(t, p.Name, Damage) })
		}
	}
}

// disturb plays a profile under disturbances.
func disturb(t *testing.T, profile string, disturbances ...Disturbance) {
	p := Profiles[slices.IndexFunc(Profiles, func(p *Profile) bool { return p.Name == profile })]
	l := lab.NewT(t, p.LabOptions())
	if err := p.Available(t.Context(), l); err != nil {
		lab.SkipOrFailModule(t, err)
	}
	w, err := p.Build(t.Context(), l, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	cells := slices.DeleteFunc(p.Cells(), func(c Cell) bool { return c.Kind != Life })
	lost := map[string]Results{}
	w.with(t, ours, func() {
		for _, d := range disturbances {
			t.Run(d.Name, func(t *testing.T) { lost[d.Name] = w.disturbed(t, cells, d) })
		}
	})
	for _, d := range disturbances {
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
