// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
)

// Output formats.
const (
	outputTable = "table"
	outputWide  = "wide"
	outputJSON  = "json"
	outputYAML  = "yaml"
)

var outputs = []string{outputTable, outputWide, outputJSON, outputYAML}

// apiVersion is that of all data that is written. Fields may be added to it; none is removed or changes its
// meaning without another version.
const apiVersion = "tandemctl.tandem-proxy.dev/v1alpha1"

// isData says that the output is for machines.
func (a *app) isData() bool { return a.output == outputJSON || a.output == outputYAML }

// writeData writes an object with its kind.
func (a *app) writeData(kind string, v any) error {
	object, err := withKind(kind, v)
	if err != nil {
		return err
	}
	if a.output == outputYAML {
		text, err := yaml.JSONToYAML(object)
		if err != nil {
			return err
		}
		_, err = a.out.Write(text)
		return err
	}
	var b bytes.Buffer
	if err := json.Indent(&b, object, "", "  "); err != nil {
		return err
	}
	_, err = b.WriteTo(a.out)
	return err
}

// writeStream writes an object of a sequence: a line of JSON, or a document of YAML.
func (a *app) writeStream(kind string, v any) error {
	if a.output == outputYAML {
		if _, err := io.WriteString(a.out, "---\n"); err != nil {
			return err
		}
		return a.writeData(kind, v)
	}
	object, err := withKind(kind, v)
	if err == nil {
		_, err = a.out.Write(object)
	}
	return err
}

// withKind is an object as a line of JSON.
func withKind(kind string, v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	fields, ok := strings.CutPrefix(b.String(), "{")
	if !ok {
		return nil, fmt.Errorf("%s is no object", kind)
	}
	if fields != "}\n" {
		fields = "," + fields
	}
	return fmt.Appendf(nil, `{"apiVersion":%q,"kind":%q%s`, apiVersion, kind, fields), nil
}

// tables is where what has tables is written. Their rows are cut to the width of a terminal, unless they are to be
// wide; other lines are not.
func (a *app) tables() io.Writer {
	if width, _ := terminalSize(a.out); width > 0 && a.output != outputWide {
		return tableWriter{a.out, width}
	}
	return a.out
}

// tableWriter tells newTable about the width of the terminal.
type tableWriter struct {
	io.Writer
	width int
}

// rowsOf is where rows of tables are written.
func rowsOf(w io.Writer) io.Writer {
	if t, ok := w.(tableWriter); ok {
		return &cutter{w: t.Writer, width: t.width}
	}
	return w
}

// cutter cuts lines that are longer than a width. Writes end a line, or go on with it.
type cutter struct {
	w     io.Writer
	width int
	at    int  // columns of the current line
	last  rune // the one in the last column: written if the line ends there
}

func (c *cutter) Write(text []byte) (int, error) {
	var b bytes.Buffer
	for _, r := range string(text) {
		if r == '\n' {
			if c.at == c.width {
				b.WriteRune(c.last)
			}
			b.WriteRune(r)
			c.at = 0
			continue
		}
		c.at++
		switch {
		case c.at < c.width:
			b.WriteRune(r)
		case c.at == c.width:
			c.last = r
		case c.at == c.width+1:
			b.WriteRune('…')
		}
	}
	if _, err := b.WriteTo(c.w); err != nil {
		return 0, err
	}
	return len(text), nil
}

// terminalSize is in columns and rows; 0 if the output is no terminal.
func terminalSize(w io.Writer) (columns, rows int) {
	f, ok := w.(*os.File)
	if !ok {
		return 0, 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0
	}
	return int(size.Col), int(size.Row)
}

// table aligns cells. An empty cell becomes a dash, so that no value is read in the wrong
// column.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, head ...string) table {
	t := table{tabwriter.NewWriter(rowsOf(w), 0, 0, 2, ' ', 0)}
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

// serviceHead are the columns of frontends, of which the last ones are counters.
var serviceHead = []string{"SERVICE", "PORT", "PROTO", "FRONTEND", "KIND", "CLIENTS", "DATAPATH", "STATE", "BACKENDS", "AFFINITY",
	"CONNECTIONS", "REJECTED", "DROPPED", "RACED", "PACKETS", "BYTES"}

const serviceCounters = 6

// serviceRows are the frontends of both datapaths, sorted by service port.
func serviceRows(list *serviceList) (rows [][]string) {
	elsewhere := list.Elsewhere
	for i := range list.Services {
		s := &list.Services[i]
		n := slices.IndexFunc(elsewhere, func(c explain.Placement) bool { return c.CompareService(s.Namespace, s.Name, s.Port, s.Protocol) >= 0 })
		if n < 0 {
			n = len(elsewhere)
		}
		rows = append(rows, placementRows(list.mode, elsewhere[:n])...)
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
				row = append(row, make([]string, serviceCounters)...)
			}
			rows = append(rows, row)
		}
	}
	return append(rows, placementRows(list.mode, elsewhere)...)
}

// watchedFrontend is a frontend of services --watch.
type watchedFrontend struct {
	Service  string `json:"service"`
	Port     string `json:"port"`
	Protocol string `json:"protocol"`
	Frontend string `json:"frontend"`
	Kind     string `json:"kind"`
	Clients  string `json:"clients"`
	Datapath string `json:"datapath"`
	State    string `json:"state"`
	Backends string `json:"backends"`
	Affinity string `json:"affinity"`
}

// watchedServices are rows to watch, without counters.
func watchedServices(list *serviceList) (rows []watched) {
	for _, r := range serviceRows(list) {
		r = r[:len(r)-serviceCounters]
		rows = append(rows, watched{
			key: strings.Join(r[:7], " "), version: strings.Join(r[7:], " "), cells: r,
			object: watchedFrontend{r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9]},
		})
	}
	return rows
}

func writeServices(w io.Writer, list serviceList, backends bool) error {
	t := newTable(w, serviceHead...)
	for _, row := range serviceRows(&list) {
		t.row(row...)
	}
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
	if err := t.flush(); err != nil {
		return err
	}
	return writeSignals(w, list.Services)
}

// writeSignals writes what TCP connections of sockets of this node to service ports came to, where that is known.
func writeSignals(w io.Writer, list []inspect.ServiceView) error {
	if !slices.ContainsFunc(list, func(s inspect.ServiceView) bool { return s.Signals != nil }) {
		return nil
	}
	fmt.Fprintln(w, "\nTCP connections of sockets of this node:")
	t := newTable(w, "SERVICE", "PORT", "ESTABLISHED", "REFUSED", "UNANSWERED", "CONNECT P50", "CONNECT P99", "RTT P50", "RTT P99", "SENT", "RECEIVED")
	for i := range list {
		s := &list[i]
		if g := s.Signals; g != nil {
			t.row(s.Namespace+"/"+s.Name, s.Port, number(g.Established), number(g.Refused), number(g.Unanswered),
				boundText(g.Connect.Count, g.Connect.MedianSeconds), boundText(g.Connect.Count, g.Connect.P99Seconds),
				boundText(g.RTT.Count, g.RTT.MedianSeconds), boundText(g.RTT.Count, g.RTT.P99Seconds),
				bytesText(g.SentBytes), bytesText(g.ReceivedBytes))
		}
	}
	return t.flush()
}

// boundText is a time of which an upper bound is known, or that is above all bounds.
func boundText(count uint64, seconds *float64) string {
	switch {
	case count == 0:
		return ""
	case seconds == nil:
		return "> 1s"
	}
	return "<= " + time.Duration(*seconds*float64(time.Second)).String()
}

// placementRows are what other datapaths serve. They have no counters.
func placementRows(mode string, list []explain.Placement) (rows [][]string) {
	for i := range list {
		c := &list[i]
		state, count := "", number(c.Backends)
		if c.Reason != "" {
			state = "not in " + mode + " (" + c.Reason + ")"
		}
		if c.Backends == 0 {
			count += " (" + c.Verdict + ")"
		}
		row := []string{c.Namespace + "/" + c.Name, c.Port, c.Protocol, c.Address.String(), c.Kind, c.Clients, c.Carrier, state, count, affinityText(c.AffinitySeconds)}
		rows = append(rows, append(row, make([]string, serviceCounters)...))
	}
	return rows
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
