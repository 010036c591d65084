// SPDX-License-Identifier: Apache-2.0

package shadow

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

const (
	neverSeenShown = 20
	othersShown    = 5
)

// WriteText writes the report for people.
func (r *Report) WriteText(w io.Writer) error {
	fmt.Fprintf(w, "%s, %s: %d connections to Services, %d agree, %d disagree\n",
		r.Node, r.Ended.Sub(r.Started).Round(time.Second), r.Connections, r.Agreements, r.Disagreements)
	if r.Lost > 0 {
		fmt.Fprintf(w, "Some connections were not compared: the kernel lost notifications %d times.\n", r.Lost)
	}
	if r.Connections == 0 {
		fmt.Fprintln(w, "No connection to a Service was seen. Connections that programs translate at their socket do not show in conntrack.")
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "SERVICE PORT\tPROTO\tCONNECTIONS\tAGREE\tDISAGREE\tENDPOINTS SEEN\tKINDS\n")
	for _, p := range r.Ports {
		var kinds []string
		for _, k := range slices.Sorted(maps.Keys(p.Kinds)) {
			kinds = append(kinds, fmt.Sprintf("%s: %d", k, p.Kinds[k]))
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d of %d\t%s\n", p.Service, orDash(p.Protocol), p.Connections, p.Agreements, p.Disagreements,
			p.EndpointsSeen, p.Endpoints, orDash(strings.Join(kinds, ", ")))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for i := range r.Examples {
		e := &r.Examples[i]
		if i == 0 {
			fmt.Fprint(w, "\nDISAGREEMENTS\n")
		}
		fmt.Fprintf(w, "\n%s  %s %s -> %s: %s\n", e.Time.Format(time.RFC3339), e.Protocol, e.Client, e.Dialed, e.Text)
		var text strings.Builder
		if err := e.Explanation.WriteText(&text); err != nil {
			return err
		}
		for line := range strings.Lines(text.String()) {
			if line != "\n" {
				line = "    " + line
			}
			fmt.Fprint(w, line)
		}
	}
	for i, f := range r.NeverSeen {
		if i == 0 {
			fmt.Fprintf(w, "\nNEVER SEEN: %d frontends\n", len(r.NeverSeen))
		}
		if i == neverSeenShown {
			fmt.Fprintf(w, "  and %d more (-o json has all)\n", len(r.NeverSeen)-i)
			break
		}
		fmt.Fprintf(w, "  %s %s %s %s\n", f.Service, f.Protocol, f.Kind, f.Address)
	}
	for i, o := range r.Others {
		if i == 0 {
			fmt.Fprint(w, "\nTRANSLATED BY SOMETHING ELSE (not Services)\n")
		}
		if i == othersShown {
			fmt.Fprintf(w, "  and %d more (-o json has all)\n", len(r.Others)-i)
			break
		}
		fmt.Fprintf(w, "  %s %s -> %s: %d times\n", o.Protocol, o.Dialed, o.Backend, o.Count)
	}
	return nil
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
