// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// heartbeat is how often a line shows what is running.
const heartbeat = 30 * time.Second

// progress says how far a run is. The zero value says nothing.
type progress struct {
	packages int // that there are
	done     int
	now      func() time.Time
	start    time.Time
}

// ended is the beginning of the line of a package that ends.
func (p *progress) ended() string {
	p.done++
	if p.packages == 0 {
		return ""
	}
	return fmt.Sprintf("[%*d/%d %4.0f s] ", len(fmt.Sprint(p.packages)), p.done, p.packages, p.now().Sub(p.start).Seconds())
}

// total is how long the run took.
func (p *progress) total() string {
	if p.now == nil {
		return ""
	}
	return fmt.Sprintf(", in %.0f s", p.now().Sub(p.start).Seconds())
}

// beat prints which tests are running.
func (s *summary) beat() {
	var running []string
	for _, name := range slices.Sorted(maps.Keys(s.pkgs)) {
		p := s.pkgs[name]
		var tests []string
		for test := range p.open {
			if !strings.Contains(test, "/") {
				tests = append(tests, test)
			}
		}
		slices.Sort(tests)
		running = append(running, fmt.Sprintf("%s %s (%s)", short(name), strings.Join(tests, " "), p.counts))
	}
	if len(running) > 0 {
		fmt.Fprintf(s.out, "      %.0f s: %s\n", s.progress.now().Sub(s.progress.start).Seconds(), strings.Join(running, ", "))
	}
}
