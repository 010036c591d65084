// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
)

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// table aligns cells. An empty cell becomes a dash, so that no value is read in the wrong
// column.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, head ...string) table {
	t := table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.row(head...)
	return t
}

func (t table) row(cells ...string) {
	for i, cell := range cells {
		if cell == "" {
			cells[i] = "-"
		}
	}
	fmt.Fprintln(t.w, strings.Join(cells, "\t"))
}

func (t table) flush() error { return t.w.Flush() }

func number[N int | uint32 | uint64](n N) string { return strconv.FormatUint(uint64(n), 10) }

// percent rounds up, so that only an empty map shows 0 %, and only a full one 100 %.
func percent(used, limit int) string {
	p := (used*100 + limit - 1) / limit
	if used < limit {
		p = min(p, 99)
	}
	return strconv.Itoa(p) + "%"
}

func bytesText(n uint64) string {
	switch {
	case n < 1<<10:
		return fmt.Sprintf("%dB", n)
	case n < 1<<20:
		return fmt.Sprintf("%.1fKiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%.1fMiB", float64(n)/(1<<20))
}

func writeServices(w io.Writer, list serviceList, backends bool) error {
	t := newTable(w, "SERVICE", "PORT", "PROTO", "FRONTEND", "KIND", "CLIENTS", "DATAPATH", "STATE", "BACKENDS", "AFFINITY",
		"CONNECTIONS", "REJECTED", "DROPPED", "RACED", "PACKETS", "BYTES")
	elsewhere := list.Elsewhere
	for i := range list.Services {
		s := &list.Services[i]
		n := slices.IndexFunc(elsewhere, func(c explain.Placement) bool { return c.CompareService(s.Namespace, s.Name, s.Port, s.Protocol) >= 0 })
		if n < 0 {
			n = len(elsewhere)
		}
		writePlacements(t, list.mode, elsewhere[:n])
		elsewhere = elsewhere[n:]
		frontends := s.Frontends
		if len(frontends) == 0 {
			// All its addresses belong to other Services, or it is being added or removed.
			frontends = []inspect.FrontendView{{}}
		}
		for j, f := range frontends {
			row := []string{s.Namespace + "/" + s.Name, s.Port, s.Protocol, "", f.Kind, f.Clients, string(capabilities.ModeEBPF),
				stateText(s), backendsText(s, f.Set), affinityText(int64(s.AffinitySeconds))}
			if f.Address.IsValid() {
				row[3] = f.Address.String()
			}
			// Counters once, so that a column can be added up.
			if c := s.Counters; j == 0 {
				row = append(row, number(c.Connections), number(c.Rejected), number(c.Dropped), number(c.Raced), number(c.Packets), bytesText(c.Bytes))
			} else {
				row = append(row, "", "", "", "", "", "")
			}
			t.row(row...)
		}
	}
	writePlacements(t, list.mode, elsewhere)
	if err := t.flush(); err != nil {
		return err
	}
	if list.Unplaced > 0 {
		fmt.Fprintf(w, "\nService ports over capacity: %d. 'tandemctl status' shows which map is full.\n", list.Unplaced)
	}
	if !backends {
		return nil
	}
	fmt.Fprintln(w)
	t = newTable(w, "SERVICE", "PORT", "PROTO", "BACKEND", "SETS", "ON NODE", "TERMINATING", "CONNECTIONS", "ID", "GENERATION")
	for i := range list.Services {
		s := &list.Services[i]
		for _, b := range s.Backends {
			sets := strings.Join(b.Sets, ",")
			if sets == "" {
				sets = "none"
			}
			t.row(s.Namespace+"/"+s.Name, s.Port, s.Protocol, b.Address.String(), sets, yesNo(b.Local), yesNo(b.Terminating),
				number(b.Connections), number(b.ID), number(b.Generation))
		}
	}
	return t.flush()
}

// writePlacements writes what other datapaths serve. They have no counters.
func writePlacements(t table, mode string, list []explain.Placement) {
	for i := range list {
		c := &list[i]
		state, count := "", number(c.Backends)
		if c.Reason != "" {
			state = "not in " + mode + " (" + c.Reason + ")"
		}
		if c.Backends == 0 {
			count += " (" + c.Verdict + ")"
		}
		t.row(c.Namespace+"/"+c.Name, c.Port, c.Protocol, c.Address.String(), c.Kind, c.Clients, c.Carrier, state, count,
			affinityText(c.AffinitySeconds), "", "", "", "", "", "")
	}
}

func stateText(s *inspect.ServiceView) string {
	text := s.State
	if s.Reason != "" {
		text += " (" + s.Reason + ")"
	}
	if s.Changing {
		text += " (changing)"
	}
	return text
}

// backendsText is the number of backends of one set, and the verdict on connections if
// there are none.
func backendsText(s *inspect.ServiceView, set string) string {
	if set == "" {
		return ""
	}
	n := 0
	for _, b := range s.Backends {
		if slices.Contains(b.Sets, set) {
			n++
		}
	}
	if n == 0 {
		for _, about := range s.Sets {
			if about.Name == set && about.Verdict != "" {
				return "0 (" + about.Verdict + ")"
			}
		}
	}
	return strconv.Itoa(n)
}

func affinityText(seconds int64) string {
	if seconds == 0 {
		return ""
	}
	return (time.Duration(seconds) * time.Second).String()
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func writeOptOuts(w io.Writer, list optOutList) error {
	t := newTable(w, "COOKIE", "BY", "PROCESSES")
	for _, o := range list.OptOuts {
		t.row(number(o.Cookie), o.By, pidsText(o.PIDs))
	}
	return t.flush()
}

// pidsText shows the first few: a pod can have thousands, and one is enough to find it.
func pidsText(pids []int) string {
	const shown = 5
	if len(pids) == 0 {
		return "none visible"
	}
	var words []string
	for _, pid := range pids[:min(shown, len(pids))] {
		words = append(words, strconv.Itoa(pid))
	}
	if more := len(pids) - shown; more > 0 {
		words = append(words, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(words, " ")
}
