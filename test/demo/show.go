// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// screen writes the demo's output: plain text, with some colour on terminals.
type screen struct {
	w      io.Writer
	colour bool
	step   int
	// short abbreviates long paths in commands.
	short *strings.Replacer
}

func newScreen(f *os.File) *screen {
	info, err := f.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	return &screen{
		w:      f,
		colour: terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb",
		short:  strings.NewReplacer(),
	}
}

const (
	bold   = "1"
	green  = "32"
	red    = "31"
	faint  = "2"
	indent = "   "
)

func (s *screen) paint(style, text string) string {
	if !s.colour {
		return text
	}
	return "\x1b[" + style + "m" + text + "\x1b[0m"
}

// title begins a step.
func (s *screen) title(format string, args ...any) {
	s.step++
	s.heading("%d. %s", s.step, fmt.Sprintf(format, args...))
}

func (s *screen) heading(format string, args ...any) {
	s.blank()
	fmt.Fprintln(s.w, s.paint(bold, fmt.Sprintf(format, args...)))
}

func (s *screen) blank() { fmt.Fprintln(s.w) }

func (s *screen) say(format string, args ...any) {
	fmt.Fprintln(s.w, indent+fmt.Sprintf(format, args...))
}

func (s *screen) good(format string, args ...any) {
	fmt.Fprintln(s.w, s.paint(green, "ok ")+fmt.Sprintf(format, args...))
}

func (s *screen) bad(format string, args ...any) {
	fmt.Fprintln(s.w, s.paint(red, "BAD")+" "+fmt.Sprintf(format, args...))
}

// command shows a command as typed in a shell.
func (s *screen) command(args []string) {
	s.say("%s", s.paint(bold, "$ "+s.short.Replace(strings.Join(args, " "))))
}

// block shows the output of a program.
func (s *screen) block(text string) {
	for line := range strings.Lines(text) {
		fmt.Fprintln(s.w, strings.TrimRight(indent+s.paint(faint, "| ")+strings.TrimRight(s.short.Replace(line), " \n"), " "))
	}
}

// bars shows the share of answers of each pod, on one line.
func (s *screen) bars(label string, pods podNames, answers map[string]int, total int) {
	const full = 18 // of all answers
	var line strings.Builder
	for _, pod := range pods {
		n := answers[pod]
		bar := strings.Repeat("#", (n*full+total/2)/total)
		fmt.Fprintf(&line, "  %s %s %3d%%", pod, s.paint(green, fmt.Sprintf("%-9s", bar)), (100*n+total/2)/total)
	}
	fmt.Fprintf(s.w, "%s%-34s%s\n", indent, label, line.String())
}

// round drops insignificant digits.
func round(d time.Duration) time.Duration {
	if d < 10*time.Millisecond {
		return d.Round(100 * time.Microsecond)
	}
	return d.Round(time.Millisecond)
}
