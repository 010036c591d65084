// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/observe/status"
	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
)

func (a *app) statusCommand() *cobra.Command {
	var server string
	c := &cobra.Command{
		Use:   "status",
		Short: "Show mode, health, last sync and problems; programs, maps and their usage",
		Long: `Asks the kube-proxy of this node for its mode, what configured it, and why another one
runs, whether Services work, its last sync, what serves how many service ports,
and the problems since its start. Then it shows what the kernel has in mode ebpf: the attached programs,
the maps they use and the usage of these, whether a kube-proxy process is running,
and how many service ports are over capacity. One of the two is enough.
Host filters are rules of this host because of which kube-proxy has rules serve
some frontends, unless it is to ignore them.

"Proxy: not running" is not an outage: the programs go on serving without a
process, but changes in the cluster are not applied. If another kube-proxy took
over meanwhile, the programs leave new connections to it.`,
		Example: `  tandemctl status
  tandemctl status -o json | jq '.process | {mode, ready, lastSuccessfulSync}'
  tandemctl status -o json | jq '.maps[]? | select(.used != null) | {name, used, max}'`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			view, err := a.status(c.Context(), server)
			if err != nil {
				return err
			}
			if a.isData() {
				return a.writeData("Status", view)
			}
			return view.write(a.tables(), a.now())
		},
	}
	addServerFlag(c.Flags(), &server)
	return c
}

// statusView is what the status command shows.
type statusView struct {
	// Process is null if no kube-proxy answered.
	Process *status.Status `json:"process"`
	// Status of the kernel is missing if it cannot be read, or no program is attached; KernelError
	// is why, or empty.
	*inspect.Status
	KernelError string `json:"kernelError"`
	// HostFilters are rules of this host because of which rules serve some frontends.
	HostFilters []string `json:"hostFilters"`
}

// status asks the process and the kernel. One of the two is enough.
func (a *app) status(ctx context.Context, server string) (*statusView, error) {
	process, asked := askServer[status.Status](ctx, a, server, status.Path, nil)
	if _, usage := errors.AsType[usageError](asked); usage {
		return nil, asked
	}
	view := &statusView{Process: process}
	inKernel := a.withInspector(func(i inspector) error {
		kernel, err := i.Status()
		view.Status = &kernel
		return err
	})
	switch {
	case inKernel == nil && asked != nil && (view.Running || server != ""):
		fmt.Fprintf(a.err, "tandemctl: only the state of the kernel is shown: %v\n", asked)
	case inKernel != nil && asked == nil: // also if this process may not look
		view.Status, view.KernelError = nil, inKernel.Error()
	case inKernel != nil && server == "" && errors.Is(asked, errNoServer):
		return nil, inKernel
	case inKernel != nil:
		return nil, errors.Join(inKernel, asked)
	}
	view.HostFilters = a.filters(ctx)
	return view, nil
}

func (v *statusView) write(w io.Writer, now time.Time) error {
	if p := v.Process; p != nil {
		if err := writeProcess(w, p, now); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	if v.Status == nil {
		_, err := fmt.Fprintf(w, "Programs: %s\n", v.KernelError)
		return err
	}
	return writeKernel(w, v.Status, v.HostFilters, now)
}

// ago is a moment, and how long ago it was.
func ago(t, now time.Time) string {
	return fmt.Sprintf("%s (%s ago)", t.Format(time.RFC3339), now.Sub(t).Round(time.Second))
}

// writeProcess shows what an operator asks first.
func writeProcess(w io.Writer, p *status.Status, now time.Time) error {
	mode := p.Mode
	if p.Mode != p.Configured {
		mode += " instead of " + p.Configured
	}
	if p.ConfiguredBy != "" { // unknown to older processes
		mode += " (" + p.ConfiguredBy + ")"
	}
	if len(p.Reasons) > 0 && p.Mode != p.Configured {
		mode += ": " + strings.Join(p.Reasons, "; ")
	}
	ready := "yes"
	if !p.Ready {
		ready = "no: " + strings.Join(failed(p), "; ")
	}
	facts := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, line := range [][2]string{
		{"Mode:", mode}, {"Ready:", ready}, {"Version:", fmt.Sprintf("%s, started %s", p.Version, ago(p.Started, now))}, {"Source:", originText(p, now)},
		{"Last sync:", syncText(p, now)}, {"Service ports:", sharesText(p.ServicePorts)}, {"Problems:", problemsText(p.Problems)},
	} {
		fmt.Fprintf(facts, "%s\t%s\n", line[0], line[1])
	}
	if d := p.Direct; d != nil {
		fmt.Fprintf(facts, "Direct return:\t%d of %d endpoints on other nodes, in %s\n", d.Ready, d.Endpoints, d.Dispatch)
	}
	for i, limit := range p.Degraded {
		fmt.Fprintf(facts, "%s\t%s\n", map[bool]string{true: "Degraded:"}[i == 0], limit)
	}
	return facts.Flush()
}

func failed(p *status.Status) (list []string) {
	for _, c := range p.Checks {
		switch {
		case c.OK:
		case c.Detail != "":
			list = append(list, c.Name+": "+c.Detail)
		default:
			list = append(list, c.Name)
		}
	}
	return list
}

// originText has the resource that was heard of least recently, as events of each have to come.
func originText(p *status.Status, now time.Time) string {
	var oldest string
	for _, resource := range slices.Sorted(maps.Keys(p.LastEvents)) {
		if oldest == "" || p.LastEvents[resource].Before(p.LastEvents[oldest]) {
			oldest = resource
		}
	}
	if oldest == "" {
		return p.Source
	}
	return fmt.Sprintf("%s, last event of %s %s ago", p.Source, oldest, now.Sub(p.LastEvents[oldest]).Round(time.Second))
}

func syncText(p *status.Status, now time.Time) string {
	s := p.LastSync
	if s == nil {
		return "none"
	}
	text := ago(s.End, now)
	switch {
	case s.Error == "":
		return fmt.Sprintf("%s, took %s", text, time.Duration(s.Duration*float64(time.Second)).Round(time.Millisecond))
	case p.LastSuccess == nil:
		return text + " failed, as all before: " + s.Error
	}
	return fmt.Sprintf("%s failed: %s; the last that succeeded: %s", text, s.Error, ago(*p.LastSuccess, now))
}

func sharesText(list []status.Share) string {
	if len(list) == 0 {
		return "none"
	}
	var parts []string
	for _, s := range list {
		if len(s.Datapaths) == 0 {
			parts = append(parts, fmt.Sprintf("%d not or only partly served ('tandemctl services' says why)", s.Count))
			continue
		}
		parts = append(parts, fmt.Sprintf("%d by %s", s.Count, strings.Join(s.Datapaths, " and ")))
	}
	return strings.Join(parts, ", ")
}

func problemsText(list []status.Problem) string {
	if len(list) == 0 {
		return "none since the start"
	}
	var parts []string
	for _, p := range list {
		parts = append(parts, fmt.Sprintf("%s %s: %d", p.Kind, p.Reason, p.Count))
	}
	return strings.Join(parts, ", ") + " (since the start; the log and Events name the objects)"
}

// fullness is how much of what it may become a map has in use, from 0 to 1; -1 where that is not known, or means nothing.
func fullness(m inspect.MapStatus) float64 {
	if m.Used == nil || m.Max <= 1 || m.Limit == 0 {
		return -1
	}
	return float64(*m.Used) / float64(m.Limit)
}

// writeKernel shows what the kernel has.
func writeKernel(w io.Writer, s *inspect.Status, filters []string, now time.Time) error {
	running := "not running"
	if s.Running {
		running = "running"
	}
	changed := "never"
	if s.LastChange != nil {
		changed = ago(*s.LastChange, now)
	}
	connections := "new ones are served"
	if y := s.YieldedTo; y != nil {
		process := ""
		if y.PID != 0 {
			process = fmt.Sprintf(" (process %s, PID %d)", y.Process, y.PID)
		}
		connections = fmt.Sprintf("new ones go to another kube-proxy%s since %s", process, ago(y.Since, now))
	}
	facts := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, line := range [][2]string{
		{"Proxy:", running}, {"Connections:", connections}, {"Cgroup:", s.Cgroup}, {"Map layout:", number(s.Layout)}, {"Last change:", changed},
		{"Over capacity:", number(s.Unplaced) + " service ports"},
	} {
		fmt.Fprintf(facts, "%s\t%s\n", line[0], line[1])
	}
	for i, filter := range filters {
		fmt.Fprintf(facts, "%s\t%s\n", map[bool]string{true: "Host filters:"}[i == 0], filter)
	}
	if err := facts.Flush(); err != nil {
		return err
	}

	fmt.Fprintln(w)
	programs := newTable(w, "HOOK", "PROGRAM", "ID", "TAG", "LOADED")
	for _, p := range s.Programs {
		programs.row(p.Hook, p.Name, number(p.ID), p.Tag, p.LoadedAt.Format(time.RFC3339))
	}
	for _, hook := range s.MissingHooks {
		programs.row(hook, "none", "", "", "")
	}
	if err := programs.flush(); err != nil {
		return err
	}

	fmt.Fprintln(w)
	devices := newTable(w, "DEVICE", "DIRECTION", "METHOD", "PROGRAM", "ID")
	for _, d := range s.Devices {
		devices.row(d.Device, d.Direction, d.Method, d.Program, number(d.ID))
	}
	if err := devices.flush(); err != nil {
		return err
	}

	fmt.Fprintln(w)
	packets := newTable(w, "PACKETS", "COUNT")
	for _, p := range s.Packets {
		if p.Count > 0 {
			packets.row(strings.ReplaceAll(p.Result, "_", " "), number(p.Count))
		}
	}
	if err := packets.flush(); err != nil {
		return err
	}

	fmt.Fprintln(w)
	worst := slices.Clone(s.Maps)
	slices.SortStableFunc(worst, func(a, b inspect.MapStatus) int { return cmp.Compare(fullness(b), fullness(a)) })
	tables := newTable(w, "MAP", "ID", "TYPE", "USED", "SIZE", "LIMIT", "FULL", "MEMORY")
	for _, m := range worst {
		used, full, memory := "", "", ""
		if m.Used != nil {
			used = number(*m.Used)
		}
		// A map of a single entry is always full.
		if m.Used != nil && m.Max > 1 {
			full = percent(*m.Used, m.Limit)
		}
		if m.MemoryBytes != nil {
			memory = bytesText(*m.MemoryBytes)
		}
		tables.row(m.Name, number(m.ID), m.Type, used, number(m.Max), number(m.Limit), full, memory)
	}
	if err := tables.flush(); err != nil {
		return err
	}
	var sum uint64
	for _, m := range s.Maps {
		if m.MemoryBytes != nil {
			sum += *m.MemoryBytes
		}
	}
	limit := ""
	if s.MapBytesLimit > 0 {
		limit = fmt.Sprintf(", and grow up to %s (--ebpf-max-map-memory)", bytesText(s.MapBytesLimit))
	}
	fmt.Fprintf(w, "All maps take %s%s.\n", bytesText(sum), limit)
	return nil
}
