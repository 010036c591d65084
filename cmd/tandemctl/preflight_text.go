// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/observe/preflight"
)

// writePreflight writes a report for people: the verdict, what leads to it, and what would change.
func writePreflight(w io.Writer, r *preflightReport, wide bool) error {
	fmt.Fprintf(w, "%s: %s\n", r.Node, r.Verdict)
	section := func(title string) { fmt.Fprintf(w, "\n%s\n", title) }

	section("MODE")
	switch r.Mode {
	case "":
		fmt.Fprintf(w, "  none of the modes that are allowed can run on Linux %s\n", r.Kernel.Kernel)
	default:
		fmt.Fprintf(w, "  %s on Linux %s\n", r.Mode, r.Kernel.Kernel)
	}
	for _, reason := range r.Reasons {
		fmt.Fprintf(w, "  - %s\n", reason.Text)
	}
	for _, reason := range r.Degraded {
		fmt.Fprintf(w, "  - limited: %s\n", reason.Text)
	}
	if r.Mode == string(capabilities.ModeEBPF) {
		if len(r.Uplinks) == 0 {
			fmt.Fprintln(w, "  - no device was found that receives traffic for this node; --ebpf-devices can name them")
		}
		for _, d := range r.Uplinks {
			fmt.Fprintf(w, "  - serves clients outside on %s\n", d)
		}
	}
	if wide {
		fmt.Fprintln(w)
		if err := r.Kernel.WriteTable(w); err != nil {
			return err
		}
	}

	section("WHAT ELSE ACTS ON SERVICE TRAFFIC")
	if len(r.Findings) == 0 {
		fmt.Fprintln(w, "  nothing was found")
	}
	sorted := slices.Clone(r.Findings)
	slices.SortStableFunc(sorted, func(a, b preflight.Finding) int { return int(b.Severity) - int(a.Severity) })
	for _, f := range sorted {
		fmt.Fprintf(w, "  %-8s %s: %s\n", f.Severity, f.Subject, f.What)
		fmt.Fprintf(w, "           %s\n", f.Means)
		if f.Set != "" {
			fmt.Fprintf(w, "           To do: %s\n", f.Set)
		}
	}

	section("SYSCTLS THAT WOULD CHANGE")
	if len(r.Settings) == 0 {
		fmt.Fprintln(w, "  none")
	}
	for _, s := range r.Settings {
		from := s.From
		if from == "" {
			from = "(does not exist yet)"
		}
		fmt.Fprintf(w, "  %s: %s -> %s\n", s.Setting, from, s.To)
	}

	section("SERVICES")
	if err := writeForecast(w, r, wide); err != nil {
		return err
	}
	writeList(w, "PROBLEMS WITH OBJECTS AND CONFIGURATION", r.Problems)
	var unseen []string
	for _, u := range r.Unseen {
		unseen = append(unseen, u.What+": "+u.Why)
	}
	writeList(w, "COULD NOT BE SEEN", unseen)
	return nil
}

func writeList(w io.Writer, title string, list []string) {
	if len(list) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%s\n", title)
	for _, text := range list {
		fmt.Fprintf(w, "  %s\n", text)
	}
}

// writeForecast writes how many frontends each datapath would serve, and those that the datapath
// of the mode would not.
func writeForecast(w io.Writer, r *preflightReport, wide bool) error {
	if r.Services == nil {
		fmt.Fprintln(w, "  unknown")
		return nil
	}
	count := map[string]int{}
	var carriers []string
	shown := r.Services
	if !wide {
		shown = only(r.Services, func(p *explain.Placement) bool { return p.Carrier != r.Mode })
	}
	for _, p := range r.Services {
		carrier := p.Carrier
		if carrier == "" {
			carrier = "nothing"
		}
		if count[carrier]++; count[carrier] == 1 {
			carriers = append(carriers, carrier)
		}
	}
	slices.Sort(carriers)
	for i, c := range carriers {
		carriers[i] = fmt.Sprintf("%d by %s", count[c], c)
	}
	if len(carriers) == 0 {
		carriers = []string{"none"}
	}
	fmt.Fprintf(w, "  frontends served: %s\n", strings.Join(carriers, ", "))
	if len(shown) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	t := newTable(w, "SERVICE", "PORT", "PROTO", "FRONTEND", "KIND", "CLIENTS", "DATAPATH", "REASON")
	for _, p := range shown {
		t.row(p.Namespace+"/"+p.Name, p.Port, p.Protocol, p.Address.String(), p.Kind, p.Clients, p.Carrier, p.Reason)
	}
	return t.flush()
}
