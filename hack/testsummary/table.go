// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// table shows packages that were tested in several places, such as kernels: those whose
// name ends with @ and the place.
type table struct {
	packages, places []string // in the order they came
	cells            map[[2]string]cell
}

type cell struct {
	counts
	seconds float64
}

func (t *table) add(name string, c counts, seconds float64) {
	pkg, place, ok := strings.Cut(name, "@")
	if !ok {
		return
	}
	if t.cells == nil {
		t.cells = map[[2]string]cell{}
	}
	if !slices.Contains(t.packages, pkg) {
		t.packages = append(t.packages, pkg)
	}
	if !slices.Contains(t.places, place) {
		t.places = append(t.places, place)
	}
	t.cells[[2]string{pkg, place}] = cell{c, seconds}
}

func (t *table) print(out io.Writer) {
	if len(t.packages) == 0 {
		return
	}
	fmt.Fprintln(out, "\nPassed/failed/skipped, and seconds:")
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "  package\t%s\n", strings.Join(t.places, "\t"))
	total := map[string]cell{}
	for _, pkg := range t.packages {
		fmt.Fprintf(w, "  %s", pkg)
		for _, place := range t.places {
			c, ok := t.cells[[2]string{pkg, place}]
			if !ok {
				fmt.Fprint(w, "\t-")
				continue
			}
			fmt.Fprintf(w, "\t%s", c)
			sum := total[place]
			sum.add(c.counts)
			sum.seconds += c.seconds
			total[place] = sum
		}
		fmt.Fprintln(w)
	}
	fmt.Fprint(w, "  all")
	for _, place := range t.places {
		fmt.Fprintf(w, "\t%s", total[place])
	}
	fmt.Fprintln(w)
	w.Flush()
}

func (c cell) String() string {
	return fmt.Sprintf("%d/%d/%d %.0f", c.passed, c.failed, c.skipped, c.seconds)
}
