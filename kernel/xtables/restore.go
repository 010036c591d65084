// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// ErrLocked is returned when another program held the lock until the timeout.
var ErrLocked = errors.New("another program holds the lock /run/xtables.lock")

// RestoreError is about input that was refused. The table with the wrong line is unchanged; tables
// before it in the input are written.
type RestoreError struct {
	// Line of the input, from 1. If the kernel refuses the input, only the nft variant knows the
	// line. With the legacy variant, it is the line of COMMIT.
	Line int
	// Output is the beginning of the program's output.
	Output string
}

func (e *RestoreError) Error() string {
	return fmt.Sprintf("restore: line %d: %s%s", e.Line, oneLine(e.Output), advice(e.Output))
}

// Restore passes input to iptables-restore. Chains and tables that the input does not name stay
// unchanged. The tables of the input are written one after the other, each atomically. A
// *RestoreError means that the input is wrong. Any other error says nothing about the input: the
// program was killed, lacks a privilege, or finds no such table.
func (t *Tools) Restore(ctx context.Context, f inet.Family, input []byte) error {
	p := t.families[f]
	if p.missing != nil {
		return p.missing
	}
	_, err := run(ctx, p.restore, input, "--noflush", "-w", p.wait)
	var failed *failure
	switch {
	case !errors.As(err, &failed):
		return err
	case locked(failed.output):
		return fmt.Errorf("restore: %w: %w", ErrLocked, err)
	}
	line := failedLine(failed.output, string(input))
	if line == 0 || namesTable(string(input), line) {
		return fmt.Errorf("restore: %w", err)
	}
	return &RestoreError{Line: line, Output: failed.output}
}

func locked(output string) bool { return strings.Contains(output, "holding the xtables lock") }

var (
	// lineNumber finds the line that programs name:
	//
	//	Error occurred at line: 12
	//	iptables-restore: line 12 failed
	//	iptables-nft-restore: line 12 failed: No chain/target/match by that name.
	//	line 12: RULE_APPEND failed (Invalid argument): rule in chain OUTPUT
	//	iptables-restore: COMMIT expected at line 12
	lineNumber = regexp.MustCompile(`(?m)^(?:Error occurred at |[\w-]+: (?:COMMIT expected at )?)?line:? (\d+)\b`)
	// noChain is an error that the nft variant reports at COMMIT.
	noChain = regexp.MustCompile(`Chain '([^']+)' does not exist`)
)

// failedLine returns the line that the program's output names, or 0.
func failedLine(output, input string) int {
	m := lineNumber.FindStringSubmatch(output)
	if m == nil {
		return 0
	}
	number, err := strconv.Atoi(m[1])
	if err != nil {
		return 0
	}
	if m := noChain.FindStringSubmatch(output); m != nil {
		return jumpLine(input, m[1], number)
	}
	return number
}

// namesTable reports whether a line of the input starts a table.
func namesTable(input string, line int) bool {
	number := 0
	for text := range strings.Lines(input) {
		if number++; number == line {
			return strings.HasPrefix(text, "*")
		}
	}
	return false
}

// jumpLine returns the first line that jumps to the chain, in the table that ends with the given
// line. It returns the given line if there is no such jump.
func jumpLine(input, chain string, end int) int {
	number, found := 0, end
	for line := range strings.Lines(input) {
		if number++; number >= end {
			break
		}
		words := strings.Fields(line)
		switch {
		case strings.HasPrefix(line, "*"):
			found = end
		case found == end && len(words) > 1 && words[len(words)-1] == chain && jumps[words[len(words)-2]]:
			found = number
		}
	}
	return found
}

var jumps = map[string]bool{"-j": true, "--jump": true, "-g": true, "--goto": true}
