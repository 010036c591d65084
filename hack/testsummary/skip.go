// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// skip is a test that was skipped.
type skip struct{ test, reason string }

type skips []skip

// remove takes a test out, and reports whether it was there.
func (s *skips) remove(test string) bool {
	before := len(*s)
	*s = slices.DeleteFunc(*s, func(k skip) bool { return k.test == test })
	return len(*s) < before
}

// print lists the tests by reason; brief says only how many there are.
func (s skips) print(out io.Writer, brief bool) {
	if len(s) == 0 {
		return
	}
	byReason := map[string][]string{}
	for _, k := range s {
		byReason[k.reason] = append(byReason[k.reason], k.test)
	}
	fmt.Fprintln(out, "\nSkipped:")
	for _, r := range slices.Sorted(maps.Keys(byReason)) {
		if brief {
			fmt.Fprintf(out, "  %5d  %s\n", len(byReason[r]), r)
			continue
		}
		fmt.Fprintf(out, "  %s\n", r)
		for _, test := range byReason[r] {
			fmt.Fprintf(out, "      %s\n", test)
		}
	}
}

var (
	// place is where a test said something.
	place = regexp.MustCompile(`^[\w.-]+\.go:\d+: `)
	// logged is a line of klog.
	logged = regexp.MustCompile(`^[IWEF]\d{4} `)
)

// reason is what a skipped test said last, without the place in the source.
func reason(output string) string {
	var said []string
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "--- SKIP") || logged.MatchString(line) {
			continue
		}
		if at := place.FindString(line); at != "" {
			said, line = nil, line[len(at):]
		}
		said = append(said, line)
	}
	if len(said) == 0 {
		return "no reason given"
	}
	return strings.Join(said, " ")
}
