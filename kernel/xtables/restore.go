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

// ErrLocked is returned when somebody else had the lock all the time.
var ErrLocked = errors.New("another program holds the lock /run/xtables.lock")

// RestoreError tells what of the input was refused. The table it was for is unchanged;
// tables before it in the input are not.
type RestoreError struct {
	// Line of the input, from 1. What the kernel refuses is known by its line in the
	// nft variant alone, in the other the line is that of COMMIT.
	Line int
	// Output is the beginning of what the program said.
	Output string
}

func (e *RestoreError) Error() string {
	return fmt.Sprintf("restore: line %d: %s%s", e.Line, oneLine(e.Output), advice(e.Output))
}

// Restore writes what iptables-restore reads, and leaves alone what the input does not
// name. Each table of the input is written at once, one after the other. A *RestoreError
// means that the input is at fault; any other says nothing about it, as that of a program
// that was killed, may not write, or finds no such table.
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
	// lineNumber is what programs call a line:
	//
	//	Error occurred at line: 12
	//	iptables-restore: line 12 failed
	//	iptables-nft-restore: line 12 failed: No chain/target/match by that name.
	//	line 12: RULE_APPEND failed (Invalid argument): rule in chain OUTPUT
	//	iptables-restore: COMMIT expected at line 12
	lineNumber = regexp.MustCompile(`(?m)^(?:Error occurred at |[\w-]+: (?:COMMIT expected at )?)?line:? (\d+)\b`)
	// noChain is found out by the nft variant no sooner than at COMMIT.
	noChain = regexp.MustCompile(`Chain '([^']+)' does not exist`)
)

// failedLine is 0 if the program named none.
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

// namesTable says whether a line of the input begins a table.
func namesTable(input string, line int) bool {
	number := 0
	for text := range strings.Lines(input) {
		if number++; number == line {
			return strings.HasPrefix(text, "*")
		}
	}
	return false
}

// jumpLine is the first line that leads to a chain, in the table that ends with the
// line given, which is the answer if there is none.
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
