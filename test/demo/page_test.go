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

	"github.com/tandem-proxy/tandem/proxier/ebpf/monitor"
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

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// promise is how long the page says that its commands take.
var promise = regexp.MustCompile(`The commands take less than (\d+) minutes in all`)

// TestFirstHour runs the commands of the page in the shell of the demo. Numbers, times, sizes, versions and the width of
// columns may differ from what the page shows. -update writes what they say to the page.
func TestFirstHour(t *testing.T) {
	kernel.NeedsPrograms(t)
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	promised := promise.FindSubmatch(text)
	if promised == nil {
		t.Fatalf("docs/first-hour.md does not say %q", promise)
	}
	limit, err := time.ParseDuration(string(promised[1]) + "m")
	if err != nil {
		t.Fatal(err)
	}
	limit *= lab.Slower()
	began := time.Now()
	shell := newShell(t)
	took := time.Since(began) // with the build and the cluster, but without what the test repeats and waits for

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
			began := time.Now()
			said := shell.run(t, c.line)
			took += time.Since(began)
			if strings.Contains(said, monitor.ErrNotSupported.Error()) {
				shell.checkUntraced(t, string(text), c.line)
				fmt.Fprintf(&written, "%s%s\n%s", prompt, c.line, c.says)
				continue
			}
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
	t.Logf("the commands took %v", took.Round(time.Second))
	if took >= limit {
		t.Errorf("the commands took %v, want less than %v", took, limit)
	}
	if updating {
		if err := os.WriteFile(page, []byte(written.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// checkUntraced stands in for the comparison of a command with the page where the kernel does not let programs be traced:
// the command fails, and the page quotes the error.
func (s *shell) checkUntraced(t *testing.T, page, line string) {
	t.Helper()
	if os.Getenv(lab.RequireModulesEnv) == "1" {
		t.Errorf("%s: %v, although this kernel has to", line, monitor.ErrNotSupported)
	}
	if !strings.Contains(page, "`"+monitor.ErrNotSupported.Error()+"`") {
		t.Errorf("docs/first-hour.md does not quote %q", monitor.ErrNotSupported)
	}
	said := s.run(t, line+"; echo exit code $?")
	if !strings.HasPrefix(said, "tandemctl: ") || !strings.HasSuffix(said, "\nexit code 1\n") {
		t.Errorf("%s: want an error and exit code 1:\n%s", line, said)
	}
	t.Logf("not compared with the page: %s: %v", line, monitor.ErrNotSupported)
}

// TestReadme plays the demo, of which the README shows two steps. Numbers, times and how requests are spread may differ.
func TestReadme(t *testing.T) {
	if testing.Short() {
		t.Skip("missing: the time to play the demo again in short mode, which make test-all has")
	}
	kernel.NeedsPrograms(t)
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	const first, next = "\n7. ", "\n\n9. "
	before, rest, found := strings.Cut(string(text), "```"+first)
	shown, after, closed := strings.Cut(rest, "```\n")
	if !found || !closed {
		t.Fatal("README.md does not show step 7 of the demo")
	}
	said, err := demo(t).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	_, steps, found := strings.Cut(string(said), first)
	steps, _, ended := strings.Cut(steps, next)
	steps += "\n"
	if !found || !ended {
		t.Fatalf("the demo has no step 7, or none after the one that follows:\n%s", said)
	}
	d := cmp.Diff(strings.Split(plain(shown), "\n"), strings.Split(plain(steps), "\n"))
	if d != "" && flag.Lookup("update").Value.String() != "true" {
		t.Errorf("-README.md +demo; -update rewrites the page:\n%s", d)
	} else if d != "" {
		if err := os.WriteFile(readme, []byte(before+"```"+first+steps+"```\n"+after), 0o644); err != nil {
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
	release = regexp.MustCompile(`\+tandem\.[^ ,]+`)
	varying = regexp.MustCompile(`\d+(\.\d+)?([KM]iB|B)\b|(\d+(\.\d+)?(µs|ms|h|m|s))+\b|\d+`)
	paths   = regexp.MustCompile(`/\S*/`)
	bars    = regexp.MustCompile(`#+`)
	spaces  = regexp.MustCompile(` +`)
)

// plain leaves out what differs between runs.
func plain(said string) string {
	said = release.ReplaceAllString(said, "+tandem")
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
	flags := exec.Command("make", "-s", "ldflags")
	flags.Dir = root
	ldflags, err := flags.Output()
	if err != nil {
		t.Fatalf("make ldflags: %v", err)
	}
	bin := t.TempDir()
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags="+strings.TrimSpace(string(ldflags)), "-o", bin+"/", "./cmd/...", "./test/demo")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return exec.Command(filepath.Join(bin, "demo"), args...)
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
