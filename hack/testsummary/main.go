// SPDX-License-Identifier: Apache-2.0

// Command testsummary reads what go test -json writes and prints it for people: a
// line per package as it ends, the output of what failed, and at the end why tests
// were skipped and how many passed, failed and were skipped. It exits non-zero if
// anything failed.
package main

import (
	"fmt"
	"os"
)

func main() {
	s := newSummary(os.Stdout)
	if err := s.read(os.Stdin); err != nil {
		fmt.Fprintf(os.Stderr, "testsummary: %v\n", err)
		os.Exit(2)
	}
	if !s.finish() {
		os.Exit(1)
	}
}
