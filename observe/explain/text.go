// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

// WriteText writes the explanation as text.
func (e *Explanation) WriteText(w io.Writer) error {
	head := e.Reason
	if e.Verdict == proxier.Forward.String() {
		// The lines about the frontend have the reason.
		if head = fmt.Sprintf("to one of %d endpoints", e.eligible()); e.eligible() == 1 {
			head = "to the only endpoint"
		}
	}
	fmt.Fprintf(w, "%s: %s\n\n", e.Verdict, head)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s:\t%s\n", name, fmt.Sprintf(format, args...))
	}
	via := ""
	if e.Flow.Device != "" {
		via = " from device " + e.Flow.Device
	}
	line("Flow", "%s %s -> %s%s", e.Flow.Protocol, e.Flow.Source, e.Flow.Destination, via)
	line("Node", "%s", e.Node)
	line("Origin", "%s: %s", e.Origin.Kind, e.Origin.Reason)
	if f := e.Frontend; f != nil {
		line("Service", "%s", f.service())
		line("Frontend", "%s %s: %s", f.Kind, f.Address, f.Match)
		line("Endpoints", "%s: %d of %d are eligible", setText(f.Set), e.eligible(), len(e.Endpoints))
		line("Source", "%s: %s", f.Source, sourceTexts[f.Source])
		line("Source ranges", "%s", f.rangesText())
		line("Affinity", "%s", f.affinityText())
		line("Algorithm", "%s", e.algorithmText())
		if len(f.Rivals) > 0 {
			line("Also claimed by", "%s (not served at this address)", strings.Join(f.Rivals, ", "))
		}
		for _, tier := range e.Tiers {
			line("Datapath "+tier.Name, "%s", tier.text())
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(e.Endpoints) > 0 {
		weights := e.weighted()
		fmt.Fprint(t, "\nENDPOINT\tSLICE\tON NODE\tELIGIBLE\t")
		if weights {
			fmt.Fprint(t, "WEIGHT\t")
		}
		fmt.Fprint(t, "REASON\n")
		for _, p := range e.Endpoints {
			reason := p.Reason
			if p.Hairpin {
				reason += ", the client itself"
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t", p.Address, p.Slice, yesNo(p.OnNode), yesNo(p.Eligible))
			if weights {
				fmt.Fprintf(t, "%d\t", p.Weight)
			}
			fmt.Fprintf(t, "%s\n", reason)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	for i, note := range e.Notes {
		if i == 0 {
			fmt.Fprintln(w)
		}
		if _, err := fmt.Fprintln(w, note); err != nil {
			return err
		}
	}
	return nil
}

func (e *Explanation) eligible() (n int) {
	for _, p := range e.Endpoints {
		if p.Eligible {
			n++
		}
	}
	return n
}

// weighted reports whether any endpoint has another weight than by default.
func (e *Explanation) weighted() bool {
	return slices.ContainsFunc(e.Endpoints, func(p Endpoint) bool { return p.Weight != proxier.DefaultWeight })
}

func (e *Explanation) algorithmText() string {
	text := e.Frontend.Algorithm
	if size := e.Frontend.TableSize; size > 0 {
		text += fmt.Sprintf(", a table of %d slots", size)
	}
	if e.weighted() {
		text += ", by weight"
	}
	if m := e.Frontend.Maglev; m != nil {
		text += fmt.Sprintf("; eBPF programs on devices select slot %d (hash of the %s): %s, on every node with a table of this size", m.Slot, m.Hash, m.Endpoint)
	}
	return text
}

func setText(set string) string {
	if strings.HasSuffix(set, "/local") {
		return set + ", endpoints on this node"
	}
	return set + ", endpoints of the cluster"
}

var sourceTexts = map[string]string{
	"keep":       "endpoints see the client's address",
	"masquerade": "endpoints may see this node's address instead of the client's",
	"any-source": "endpoints see the client's or this node's address",
}

func (f *Frontend) rangesText() string {
	if f.SourceRanges == nil {
		return "none: all sources are allowed"
	}
	list := make([]string, 0, len(f.SourceRanges))
	for _, p := range f.SourceRanges {
		list = append(list, p.String())
	}
	text := strings.Join(list, ", ")
	if text == "" {
		text = "no range"
	}
	if f.Admitted {
		return text + ": the source is allowed"
	}
	return text + ": the source is not allowed"
}

func (f *Frontend) affinityText() string {
	if f.AffinitySeconds == 0 {
		return "none"
	}
	return fmt.Sprintf("ClientIP, %s", time.Duration(f.AffinitySeconds)*time.Second)
}

func (t *Tier) text() string {
	text := "serves it"
	if !t.Carries {
		text = "does not serve it"
	}
	if t.Detail != "" {
		text += ": " + t.Detail
	}
	return text
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
