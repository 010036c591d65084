// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/component-base/cli"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/cmd/kube-proxy/app"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// asProxy makes a copy of the test program run as kube-proxy.
const asProxy = "TANDEM_TEST_AS_KUBE_PROXY"

func TestMain(m *testing.M) {
	if os.Getenv(asProxy) != "" {
		os.Exit(cli.Run(app.NewCommand()))
	}
	os.Exit(m.Run())
}

// ours is the proxy under test.
var ours = Program{Title: "ebpf", Binary: os.Args[0], Mode: "ebpf", Ours: true, Env: []string{asProxy + "=1"}}

// controls are what it is compared with: netfilter, by our rules and by upstream's.
func controls() []Program {
	list := []Program{{Title: "our mode iptables", Binary: os.Args[0], Mode: "iptables", Ours: true, Env: []string{asProxy + "=1"}}}
	if binary, err := upstream.Binary(); err == nil {
		list = append(list, Program{Title: "upstream's mode iptables", Binary: binary, Mode: "iptables"})
	}
	return list
}

// TestProfiles plays all cells on all profiles. Lost cells have to be those that the profile
// names.
func TestProfiles(t *testing.T) {
	kernel.NeedsPrograms(t)
	for i, p := range Profiles {
		if p.chosen(i) {
			t.Run(p.Name, func(t *testing.T) { test(t, p) })
		}
	}
}

// chosen reports whether this run plays a profile. Kernels that have all modules share those that
// need devices, and play no others, which play everywhere else. A run that records plays all.
func (p *Profile) chosen(i int) bool {
	switch {
	case *recordFile != "":
		return true
	case os.Getenv(lab.RequireModulesEnv) == "1":
		return len(p.Kinds) > 0 && kernel.Dealt(i)
	case testing.Short():
		return p.Short
	}
	return true
}

var recordFile = flag.String("record", "", "file of this kernel's results, which docs/hosts.md shows: testdata/results/6.12.txt on Linux 6.12, testdata/results/5.15.txt with TANDEM_AS_LINUX=5.15")

// record replaces the result of a profile in the file of -record.
func record(t *testing.T, p *Profile, result Result) {
	t.Helper()
	if *recordFile == "" {
		return
	}
	if want := cmp.Or(kernel.AsLinux(), kernel.Version(t)) + ".txt"; filepath.Base(*recordFile) != want {
		t.Fatalf("-record=%s on another kernel, want a file %s", *recordFile, want)
	}
	r, err := ReadRecord(*recordFile)
	if err != nil {
		t.Fatal(err)
	}
	r[p.Name] = result
	if err := r.Write(*recordFile); err != nil {
		t.Fatal(err)
	}
}

func test(t *testing.T, p *Profile) {
	began := time.Now()
	kernel.Needs(t, p.Needs...)
	l := lab.NewT(t, p.LabOptions())
	if err := p.Available(t.Context(), l); err != nil {
		lab.SkipOrFailModule(t, err)
	}
	w, err := p.Build(t.Context(), l, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}()
	built := time.Since(began)
	cells := slices.DeleteFunc(p.Cells(), func(c Cell) bool { return matching(p.Neither, c) != nil })
	results, log, servers := w.run(t, ours, cells)
	took := time.Since(began) - built

	var lost []Cell // and not known
	known, kept := 0, map[*Exception][]Cell{}
	for _, c := range cells {
		e := matching(p.Lost, c)
		switch {
		case results[c] != nil && e != nil:
			known++
		case results[c] != nil:
			lost = append(lost, c)
		case e != nil:
			kept[e] = append(kept[e], c)
		}
	}
	for e, cells := range kept {
		t.Errorf("%d cells work now, so the profile must not name them as lost (%s); the first is %s", len(cells), e, cells[0])
	}
	if len(lost) > 0 && !kernel.Has(capabilities.ConntrackLookup) {
		// Without it, programs and netfilter may give two connections the same source port (docs/limits.md). That hits
		// a cell once in thousands of connections, and not twice.
		t.Logf("lost, and played again: %v", lost)
		again, _, _ := w.run(t, ours, lost)
		lost = slices.DeleteFunc(lost, func(c Cell) bool { return again[c] == nil })
		maps.Copy(results, again)
	}
	record(t, p, Result{Kept: len(cells) - known - len(lost), Cells: len(cells), Outside: servers, Digest: p.digest()})
	if !testing.Short() {
		w.audit(t)
	}
	if len(lost) > 0 {
		t.Logf("the node:\n%s", w.State(t.Context()))
		t.Logf("the proxy's log:\n%s", log)
		w.judge(t, lost, results)
	}
	t.Logf("%d cells, %d lost and known, %d lost; built in %v, played in %v", len(cells), known, len(lost), built, took)
}

// audit plays what the profile says about netfilter: it keeps what the proxy loses and what the
// policy denies, and does not keep what neither keeps.
func (w *World) audit(t *testing.T) {
	t.Helper()
	cells := slices.DeleteFunc(w.Cells(), func(c Cell) bool {
		if matching(w.Neither, c) != nil {
			// Cells with several endpoints are lost at random.
			return c.Kind == Life || len(w.wants(c)) > 1
		}
		return matching(w.Lost, c) == nil && matching(w.Denied, c) == nil
	})
	if len(cells) == 0 {
		return
	}
	control := controls()[0]
	results, _, _ := w.run(t, control, cells)
	for _, c := range cells {
		switch neither := matching(w.Neither, c); {
		case neither == nil && results[c] != nil:
			t.Errorf("%s: %s loses it as well: %v", c, control.Title, results[c])
		case neither != nil && results[c] == nil && w.wants(c) != nil:
			t.Errorf("%s: %s keeps it, so the profile must not say that neither does (%s)", c, control.Title, neither)
		}
	}
}

// judge plays lost cells with the controls. Cells that a control keeps are errors, and those
// that none keeps are as well: the profile must say that they are kept by neither.
func (w *World) judge(t *testing.T, lost []Cell, results Results) {
	t.Helper()
	var kept []Results
	for _, program := range controls() {
		r, _, _ := w.run(t, program, lost)
		kept = append(kept, r)
	}
	for _, group := range grouped(lost) {
		var lines []string
		for _, c := range group {
			text := fmt.Sprintf("%s: %v", c, results[c])
			for i, program := range controls() {
				if err := kept[i][c]; err != nil {
					text += fmt.Sprintf("; also with %s: %v", program.Title, err)
				}
			}
			lines = append(lines, text)
		}
		t.Errorf("lost:\n%s", strings.Join(lines, "\n"))
	}
}

// grouped are cells that differ in frontend, protocol and family only.
func grouped(cells []Cell) (groups [][]Cell) {
	at := map[Cell]int{}
	for _, c := range cells {
		key := c
		key.Frontend, key.Network = "", ""
		i, ok := at[key]
		if !ok {
			i, at[key] = len(groups), len(groups)
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], c)
	}
	return groups
}

// run plays cells with a program, and removes it again.
func (w *World) run(t *testing.T, program Program, cells []Cell) (Results, string, Servers) {
	t.Helper()
	run := Run{Program: program, Cleaner: ours, Cells: cells}
	if program.Mode == "ebpf" {
		run.Played = func(r Results) { w.traces(t, r) }
	}
	o, err := w.Run(t.Context(), run)
	if err != nil {
		t.Errorf("%s: %v", program.Title, err)
	}
	if o == nil {
		t.FailNow()
	}
	return o.Results, o.Log, o.Servers
}

// traces shows the packets of some lost cells that are not known.
func (w *World) traces(t *testing.T, results Results) {
	t.Helper()
	groups := grouped(w.Unexpected(results))
	const most = 4
	for _, group := range groups[:min(most, len(groups))] {
		t.Logf("trace of %s", w.Trace(t.Context(), group[0]))
	}
}
