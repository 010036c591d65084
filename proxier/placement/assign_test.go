// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// Every frontend goes to the first candidate that does not refuse it, with the reasons of
// those before it.
func TestAssign(t *testing.T) {
	d := &proxier.Decision{Frontends: []proxier.Frontend{
		{Kind: proxier.ClusterIP, Addr: netip.MustParseAddrPort("10.96.0.1:80")},
		{Kind: proxier.ExternalIP, Addr: netip.MustParseAddrPort("203.0.113.1:80")},
		{Kind: proxier.NodePort, Addr: netip.MustParseAddrPort("0.0.0.0:30080")},
	}}
	only := func(why string, kinds ...proxier.Kind) Candidate {
		return Candidate{Refuses: func(_ *proxier.Decision, f *proxier.Frontend) error {
			for _, k := range kinds {
				if f.Kind == k {
					return nil
				}
			}
			return errors.New(why)
		}}
	}
	anything, nothing := Candidate{}, only("full")
	also := Candidate{Also: func(_ *proxier.Decision, f *proxier.Frontend) bool { return f.Kind.Wildcard() }}
	everything := Candidate{Also: func(*proxier.Decision, *proxier.Frontend) bool { return true }}
	internal, external := only("not internal", proxier.ClusterIP), only("not external", proxier.ExternalIP, proxier.NodePort)
	for _, tt := range []struct {
		name string
		list []Candidate
		// parts by candidate, as kinds; and for each frontend, which candidate serves it and why others do not.
		parts, chosen string
	}{
		{"the first takes everything", []Candidate{anything, anything}, "all; -", "0 [], 0 [], 0 []"},
		{"the first takes nothing", []Candidate{nothing, anything}, "-; all", "1 [full], 1 [full], 1 [full]"},
		{"two share", []Candidate{internal, anything}, "ClusterIP; ExternalIP NodePort", "0 [], 1 [not internal], 1 [not internal]"},
		{"three share, in order", []Candidate{internal, only("no", proxier.NodePort), anything}, "ClusterIP; NodePort; ExternalIP", "0 [], 2 [not internal no], 1 [not internal]"},
		{"a service port opts out of the first", []Candidate{nothing, internal, anything}, "-; ClusterIP; ExternalIP NodePort", "1 [full], 2 [full not internal], 2 [full not internal]"},
		{"another proxy serves what is external", []Candidate{external, anything}, "ExternalIP NodePort; ClusterIP", "1 [not external], 0 [], 0 []"},
		{"no candidate takes one kind", []Candidate{internal, only("no", proxier.ExternalIP)}, "ClusterIP; ExternalIP", "0 [], 1 [not internal], 2 [not internal no]"},
		{"the second has wildcards also", []Candidate{anything, also}, "all; NodePort", "0 [], 0 [], 0 []"},
		{"the second has everything also", []Candidate{anything, everything}, "all; all", "0 [], 0 [], 0 []"},
		{"the second has the rest, and wildcards also", []Candidate{only("x", proxier.ClusterIP, proxier.NodePort), also}, "ClusterIP NodePort; ExternalIP NodePort", "0 [], 1 [x], 0 []"},
		{"no candidate", nil, "", "0 [], 0 [], 0 []"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			parts := make([]*proxier.Decision, len(tt.list))
			for i := range parts {
				parts[i] = d // of another time
			}
			Assign(tt.list, d, parts)
			var texts, chosen []string
			for _, p := range parts {
				switch p {
				case nil:
					texts = append(texts, "-")
				case d:
					texts = append(texts, "all")
				default:
					var kinds []string
					for i := range p.Frontends {
						kinds = append(kinds, p.Frontends[i].Kind.String())
					}
					texts = append(texts, strings.Join(kinds, " "))
				}
			}
			for i := range d.Frontends {
				by, reasons := Choose(tt.list, d, &d.Frontends[i])
				chosen = append(chosen, fmt.Sprint(by, " ", reasons))
			}
			if got := strings.Join(texts, "; "); got != tt.parts {
				t.Errorf("parts %q, want %q", got, tt.parts)
			}
			if got := strings.Join(chosen, ", "); got != tt.chosen {
				t.Errorf("chosen %q, want %q", got, tt.chosen)
			}
		})
	}
	empty := &proxier.Decision{}
	parts := []*proxier.Decision{d, d}
	if Assign([]Candidate{anything, everything}, empty, parts); parts[0] != nil || parts[1] != nil {
		t.Errorf("a part of a decision without frontends: %v", parts)
	}
}
