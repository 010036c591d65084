// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// maxOutput is how many bytes of a program's error output are kept. The first error fits; a table
// of wrong rules causes thousands.
const maxOutput = 2 << 10

// environment is the complete environment of programs, because their output is parsed. Variables of
// the caller could name another lock file, or directories with other extensions. PATH is for images
// in which the programs are scripts.
var environment = []string{"LC_ALL=C", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

// failure is a program that exited unsuccessfully, and was not killed.
type failure struct {
	program string
	output  string
}

func (e *failure) Error() string { return e.program + ": " + oneLine(e.output) + advice(e.output) }

// oneLine returns a program's output as one line, for messages.
func oneLine(output string) string {
	output, _, _ = strings.Cut(output, "\nTry `") // "… --help for more information."
	lines := strings.FieldsFunc(output, func(r rune) bool { return r == '\n' })
	return strings.Join(lines, "; ")
}

// run returns the standard output of a program. The program is killed when the context ends.
func run(ctx context.Context, path string, input []byte, args ...string) (string, error) {
	var out strings.Builder
	var complaints head
	c := exec.CommandContext(ctx, path, args...)
	c.Env = environment
	c.Stdin = bytes.NewReader(input)
	c.Stdout, c.Stderr = &out, &complaints
	// Children of scripts may keep the pipes open. On a busy node, reading what was written
	// can take more than a second.
	c.WaitDelay = 10 * time.Second
	err := c.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return out.String(), nil
	case ctx.Err() != nil:
		return "", fmt.Errorf("run %s: %w", filepath.Base(path), context.Cause(ctx))
	case !errors.As(err, &exit) || !exit.Exited():
		return "", fmt.Errorf("run %s: %w", filepath.Base(path), err)
	}
	return "", &failure{program: filepath.Base(path), output: complaints.describe(exit)}
}

// head keeps the beginning of its input.
type head struct {
	kept []byte
	more bool
}

func (h *head) Write(b []byte) (int, error) {
	n := min(len(b), maxOutput-len(h.kept))
	h.kept = append(h.kept, b[:n]...)
	h.more = h.more || n < len(b)
	return len(b), nil
}

func (h *head) describe(exit *exec.ExitError) string {
	text := strings.TrimSpace(string(h.kept))
	switch {
	case text == "":
		return exit.Error()
	case h.more:
		return text + " …"
	}
	return text
}

// advice returns a hint for some errors, to be appended to the message.
func advice(output string) string {
	for _, a := range []struct{ complaint, advice string }{
		{"can't open lock file", "in a container, mount the host's /run/xtables.lock"},
		{"Permission denied", "CAP_NET_ADMIN is needed, and for the legacy variant CAP_NET_RAW"},
		{"Couldn't load match", "the extension is missing: install all of package iptables"},
		{"Table does not exist", "load the kernel module of the table, such as iptable_nat or ip6table_nat"},
		{"Could not fetch rule set generation id", "load the kernel module nf_tables"},
		{"unable to initialize table", "load the kernel module of the table"},
		{"missing kernel module", "load the kernel module nft_compat and that of the extension"},
	} {
		if strings.Contains(output, a.complaint) {
			return " (" + a.advice + ")"
		}
	}
	return ""
}
