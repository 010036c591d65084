// SPDX-License-Identifier: Apache-2.0

// Command testsummary reads what go test -json writes and prints it for people: a
// line per package as it ends, the output of what failed, and at the end why tests
// were skipped and how many passed, failed and were skipped. It exits non-zero if
// anything failed.
//
//	go test -json ./... | testsummary [-packages 61] [-brief]
//
// With the number of packages, each line says how many have ended, and after how long. While
// packages take their time, a line every half minute says which test is running.
package main

import (
	"flag"
	"fmt"
	"os"
	"time"
)

func main() {
	s := newSummary(os.Stdout)
	flag.IntVar(&s.progress.packages, "packages", 0, "how many packages there are")
	flag.BoolVar(&s.brief, "brief", false, "of tests that are skipped for one reason, say only how many")
	flag.Parse()
	s.progress.now, s.progress.start = time.Now, time.Now()
	if err := s.read(os.Stdin); err != nil {
		fmt.Fprintf(os.Stderr, "testsummary: %v\n", err)
		os.Exit(2)
	}
	if !s.finish() {
		os.Exit(1)
	}
}
