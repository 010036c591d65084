// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	_ "github.com/tandem-proxy/tandem/test/golden" // -update
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

const (
	root   = "../.."
	page   = root + "/docs/first-hour.md"
	readme = root + "/README.md"
	prompt = "node1# "
)

// TestMain lets the test program be the demo.
func TestMain(m *testing.M) {
	if os.Getenv("TANDEM_TEST_AS_DEMO") != "" {
		main()
		os.Exit(0)
	}
	lab.Main()
	os.Exit(m.Run())
}

// TestFirstHour runs the commands of the page in the shell of the demo. Numbers, times, sizes and the width of
// columns may differ from what the page shows. -update writes what they say to the page.
func TestFirstHour(t *testing.T) {
	kernel.NeedsPrograms(t)
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	shell := newShell(t)

	var written strings.Builder
	updating := flag.Lookup("update").Value.String() == "true"
	for n, part := range strings.Split(string(text), "```console\n") {
		if n == 0 {
			written.WriteString(part)
			continue
		}
		block, rest, _ := strings.Cut(part, "```\n")
		written.WriteString("```console\n")
		for _, c := range commandsOf(block) {
			said := shell.run(t, c.line)
			// kube-proxy follows changes of files, and flows show what clients have begun.
			for end := time.Now().Add(10 * time.Second); !updating && plain(said) != plain(c.says) && time.Now().Before(end); {
				time.Sleep(50 * time.Millisecond)
				said = shell.run(t, c.line)
			}
			if d := cmp.Diff(strings.Split(plain(c.says), "\n"), strings.Split(plain(said), "\n")); d != "" && !updating {
				t.Errorf("%s (-docs/first-hour.md +command; -update rewrites the page):\n%s", c.line, d)
			}
			if updating { // what the next one shows has to be there
				time.Sleep(time.Second)
			}
			fmt.Fprintf(&written, "%s%s\n%s", prompt, c.line, said)
		}
		written.WriteString("```\n" + rest)
	}
	if updating {
		if err := os.WriteFile(page, []byte(written.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReadme plays the demo, whose last steps the README shows. Numbers, times and how requests are spread may differ.
func TestReadme(t *testing.T) {
	if testing.Short() {
		t.Skip("make test plays the demo besides")
	}
	kernel.NeedsPrograms(t)
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	const first = "\n5. "
	before, rest, found := strings.Cut(string(text), "```"+first)
	shown, after, closed := strings.Cut(rest, "```\n")
	if !found || !closed {
		t.Fatal("README.md does not show step 5 of the demo")
	}
	said, err := demo(t).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	_, last, found := strings.Cut(string(said), first)
	last, _, ended := strings.Cut(last, "\nok All steps succeeded")
	if !found || !ended {
		t.Fatalf("the demo has no step 5, or no end:\n%s", said)
	}
	d := cmp.Diff(strings.Split(plain(shown), "\n"), strings.Split(plain(last), "\n"))
	if d != "" && flag.Lookup("update").Value.String() != "true" {
		t.Errorf("-README.md +demo; -update rewrites the page:\n%s", d)
	} else if d != "" {
		if err := os.WriteFile(readme, []byte(before+"```"+first+last+"```\n"+after), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

type command struct{ line, says string }

// commandsOf are those of a block.
func commandsOf(block string) (list []command) {
	for line := range strings.Lines(block) {
		if after, ok := strings.CutPrefix(line, prompt); ok {
			list = append(list, command{line: strings.TrimSpace(after)})
		} else {
			list[len(list)-1].says += line
		}
	}
	return list
}

var (
	varying = regexp.MustCompile(`\d+(\.\d+)?([KM]iB|B)\b|(\d+(\.\d+)?(µs|ms|h|m|s))+\b|\d+`)
	paths   = regexp.MustCompile(`/\S*/`)
	bars    = regexp.MustCompile(`#+`)
	spaces  = regexp.MustCompile(` +`)
)

// plain leaves out what differs between runs.
func plain(said string) string {
	said = bars.ReplaceAllString(paths.ReplaceAllString(said, "/…/"), "#")
	return spaces.ReplaceAllString(varying.ReplaceAllString(said, "0"), " ")
}

// shell is one of the demo.
type shell struct {
	in  io.Writer
	out *bufio.Reader
}

// demo is the command that runs the demo, with the programs of this tree.
func demo(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	bin := t.TempDir()
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", bin+"/", "./cmd/kube-proxy", "./cmd/tandemctl")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(bin, "demo")
	if err := os.WriteFile(file, []byte("#!/bin/sh\nTANDEM_TEST_AS_DEMO=1 exec "+self+" \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return exec.Command(file, append([]string{"-bin", bin}, args...)...)
}

func newShell(t *testing.T) *shell {
	t.Helper()
	cmd := demo(t, "-shell", "bash", "--norc")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the demo's shell: %v", err)
		}
	})
	return &shell{in, bufio.NewReader(out)}
}

const endOfCommand = "--- end of the command ---"

// run runs a command, and returns what it says.
func (s *shell) run(t *testing.T, line string) string {
	t.Helper()
	if _, err := fmt.Fprintf(s.in, "{ %s\n} 2>&1; echo; echo '%s'\n", line, endOfCommand); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	for {
		text, err := s.out.ReadString('\n')
		if err != nil {
			t.Fatalf("%s: %v\n%s%s", line, err, &said, text)
		}
		if strings.TrimSpace(text) == endOfCommand {
			break
		}
		said.WriteString(text)
	}
	// A line more than it says, in case that the last one had no end.
	return strings.TrimRight(said.String(), "\n") + map[bool]string{true: "\n"}[strings.TrimSpace(said.String()) != ""]
}
