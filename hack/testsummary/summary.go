// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"
)

// event is a line of go test -json; see go doc test2json.
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build events, in place of Package
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

// counts of tests. Only leaves count: a test with subtests stands for them, and
// counting it as well would make one failure two.
type counts struct{ passed, failed, skipped int }

func (c *counts) add(other counts) {
	c.passed += other.passed
	c.failed += other.failed
	c.skipped += other.skipped
}

func (c counts) String() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", c.passed, c.failed, c.skipped)
}

// pkg is a package that is being tested.
type pkg struct {
	counts
	output map[string]*strings.Builder // by test; the package's own under ""
	open   map[string]bool             // started and not ended
	group  map[string]bool             // tests that have subtests
	broken map[string]bool             // groups in which a subtest failed
	cached bool
}

// failure is a test that failed.
type failure struct {
	name string
	// why are the last messages of the test, a line each.
	why []string
}

type summary struct {
	out    io.Writer
	total  counts
	pkgs   map[string]*pkg
	builds map[string]*strings.Builder // output of the compiler by import path
	failed []failure
	// skipped has the reason of each test that was skipped, in order. One that a later
	// stage plays is not skipped.
	skipped skips
	// brief leaves out their names.
	brief    bool
	table    table
	progress progress
}

func newSummary(out io.Writer) *summary {
	return &summary{
		out:    out,
		pkgs:   map[string]*pkg{},
		builds: map[string]*strings.Builder{},
	}
}

func (s *summary) read(r io.Reader) error {
	lines, failed := make(chan []byte), make(chan error, 1)
	go func() {
		defer close(lines)
		in := bufio.NewReader(r) // not a Scanner: a line of output has any length
		for {
			line, err := in.ReadBytes('\n')
			if len(line) > 0 {
				lines <- line
			}
			if err == io.EOF {
				return
			}
			if err != nil {
				failed <- fmt.Errorf("read events: %w", err)
				return
			}
		}
	}()
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.beat()
		case line, more := <-lines:
			if !more {
				select {
				case err := <-failed:
					return err
				default:
					return nil
				}
			}
			var e event
			if json.Unmarshal(line, &e) == nil && e.Action != "" {
				s.handle(e)
			} else {
				fmt.Fprintf(s.out, "%s", line) // the go command's own words
			}
		}
	}
}

func (s *summary) handle(e event) {
	if strings.HasPrefix(e.Action, "build-") {
		if s.builds[e.ImportPath] == nil {
			s.builds[e.ImportPath] = &strings.Builder{}
		}
		s.builds[e.ImportPath].WriteString(e.Output)
		return
	}
	p := s.pkgs[e.Package]
	if p == nil {
		p = &pkg{output: map[string]*strings.Builder{}, open: map[string]bool{}, group: map[string]bool{}, broken: map[string]bool{}}
		s.pkgs[e.Package] = p
	}
	switch e.Action {
	case "run":
		p.open[e.Test] = true
		for parent := range parents(e.Test) {
			p.group[parent] = true
		}
	case "output":
		p.note(e)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.endPackage(e, p)
		} else {
			s.endTest(e, p)
		}
	}
}

// note keeps output until it is known whether anybody has to see it.
func (p *pkg) note(e event) {
	text := strings.TrimSpace(e.Output)
	for _, noise := range []string{"=== RUN", "=== PAUSE", "=== CONT", "=== NAME"} {
		if strings.HasPrefix(text, noise) {
			return
		}
	}
	if e.Test == "" && strings.HasPrefix(text, "ok ") && strings.HasSuffix(text, "(cached)") {
		p.cached = true
	}
	if p.output[e.Test] == nil {
		p.output[e.Test] = &strings.Builder{}
	}
	p.output[e.Test].WriteString(e.Output)
}

func (p *pkg) said(test string) string {
	if b := p.output[test]; b != nil {
		return b.String()
	}
	return ""
}

func (s *summary) endTest(e event, p *pkg) {
	delete(p.open, e.Test)
	name := short(e.Package) + " " + e.Test
	if s.skipped.remove(name) {
		s.total.skipped--
	}
	switch e.Action {
	case "pass":
		if !p.group[e.Test] {
			p.passed++
		}
	case "skip":
		p.skipped++
		s.skipped = append(s.skipped, skip{name, reason(p.said(e.Test))})
	case "fail":
		s.show(p.said(e.Test))
		if p.broken[e.Test] {
			break // its subtests were counted
		}
		p.failed++
		s.failed = append(s.failed, failure{name, messages(p.said(e.Test))})
		for parent := range parents(e.Test) {
			p.broken[parent] = true
		}
	}
	delete(p.output, e.Test)
}

func (s *summary) endPackage(e event, p *pkg) {
	defer delete(s.pkgs, e.Package)
	name := short(e.Package)
	if e.Action == "fail" {
		if build := s.builds[e.FailedBuild]; build != nil {
			s.show(build.String())
		}
		s.show(p.said(""))
		// A panic or a timeout ends the process in the middle of tests.
		for test := range p.open {
			s.show(p.said(test))
			if !p.group[test] {
				p.failed++
				s.failed = append(s.failed, failure{name: name + " " + test + " (did not end)"})
			}
		}
		if p.failed == 0 {
			p.failed++
			s.failed = append(s.failed, failure{name: name + " (the package itself)"})
		}
	}
	s.total.add(p.counts)
	s.table.add(name, p.counts, e.Elapsed)
	fmt.Fprint(s.out, s.progress.ended())
	switch {
	case p.failed > 0:
		fmt.Fprintf(s.out, "FAIL  %-28s %7.1f s  %s\n", name, e.Elapsed, p.counts)
	case p.counts == counts{}:
		fmt.Fprintf(s.out, "-     %-28s no tests\n", name)
	case p.cached:
		fmt.Fprintf(s.out, "ok    %-28s   cached   %s\n", name, p.counts)
	default:
		fmt.Fprintf(s.out, "ok    %-28s %7.1f s  %s\n", name, e.Elapsed, p.counts)
	}
}

// finish prints the end of the report and reports whether all is well.
func (s *summary) finish() bool {
	// The stream is incomplete: its writer was killed.
	for name := range s.pkgs {
		s.total.failed++
		s.failed = append(s.failed, failure{name: short(name) + " (did not end)"})
	}
	s.skipped.print(s.out, s.brief)
	if len(s.failed) > 0 {
		slices.SortStableFunc(s.failed, func(a, b failure) int { return strings.Compare(a.name, b.name) })
		fmt.Fprintln(s.out, "\nFailed:")
		for _, f := range s.failed {
			fmt.Fprintf(s.out, "  %s\n", f.name)
			for _, line := range f.why {
				fmt.Fprintf(s.out, "      %s\n", line)
			}
		}
	}
	s.table.print(s.out)
	if s.total == (counts{}) {
		fmt.Fprintln(s.out, "\nNo tests were run.")
	}
	fmt.Fprintf(s.out, "\n%s%s\n", s.total, s.progress.total())
	return s.total.failed == 0 && s.total != counts{}
}

// messageLine is the beginning of a message in a test's output.
var messageLine = regexp.MustCompile(`^ +\w+\.go:\d+: `)

// processLog is the beginning of a message that holds the log of a process, of which the first line says nothing.
var processLog = regexp.MustCompile(`: log of the process on \w+:$`)

// messages are the first lines of the first and last messages in a test's output, so that the end of the report, which may
// be all that is kept of it, says why a test failed: what fails comes first or last, and notes between or after.
// Of a command that has none, such as the demo, they are its last lines.
func messages(output string) []string {
	const atMost, last, width = 3, 8, 300 // messages at each end, lines, bytes
	var said, all []string
	for line := range strings.Lines(output) {
		isMessage := messageLine.MatchString(line)
		line = strings.TrimSpace(line)
		line = line[:min(len(line), width)]
		if isMessage && !processLog.MatchString(line) {
			said = append(said, line)
		}
		if line != "" && !strings.HasPrefix(line, "--- FAIL") {
			all = append(all, line)
		}
	}
	switch {
	case len(said) == 0:
		return all[max(0, len(all)-last):]
	case len(said) > 2*atMost:
		return slices.Delete(said, atMost, len(said)-atMost)
	default:
		return said
	}
}

func (s *summary) show(output string) {
	for line := range strings.Lines(output) {
		fmt.Fprintf(s.out, "      %s\n", strings.TrimRight(line, "\n"))
	}
}

// parents yields the tests a subtest is part of.
func parents(test string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for i := range test {
			if test[i] == '/' && !yield(test[:i]) {
				return
			}
		}
	}
}

// short is a package's path inside the module.
func short(path string) string {
	if parts := strings.SplitN(path, "/", 4); len(parts) == 4 && strings.Contains(parts[0], ".") {
		return parts[3]
	}
	return path
}
