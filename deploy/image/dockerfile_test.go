// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"errors"
	goversion "go/version"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// run runs a program in a directory.
func run(t *testing.T, dir string, env []string, name string, args ...string) string {
	t.Helper()
	c := exec.CommandContext(t.Context(), name, args...)
	c.Dir, c.Env = dir, append(append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null"), env...)
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// buildStep is the command of the Dockerfile that builds the programs.
func buildStep(t *testing.T, dockerfile []byte) string {
	t.Helper()
	for line := range bytes.Lines(dockerfile) {
		if step, ok := strings.CutPrefix(string(line), "RUN "); ok && strings.Contains(step, "./deploy/image/build") {
			return step
		}
	}
	t.Fatal("no step of the Dockerfile builds the programs")
	return ""
}

// TestDockerfileGo: the Dockerfile names a patch release of Go, which go.mod admits. The image of that Go downloads no newer one.
func TestDockerfileGo(t *testing.T) {
	version := func(file, line string) string {
		text, err := os.ReadFile(filepath.Join("../..", file))
		if err != nil {
			t.Fatal(err)
		}
		found := regexp.MustCompile(`(?m)^` + line + `(\d+\.\d+\.\d+)$`).FindSubmatch(text)
		if found == nil {
			t.Fatalf("%s names no patch release of Go", file)
		}
		return "go" + string(found[1])
	}
	if builds, needs := version("Dockerfile", "ARG GO="), version("go.mod", "go "); goversion.Compare(builds, needs) < 0 {
		t.Errorf("the Dockerfile builds with %s, and go.mod needs %s", builds, needs)
	}
}

// TestDockerfileVersion: the programs of an image that a plain 'docker build .' makes state the version and the revision of the
// sources, and whether these were changed.
func TestDockerfileVersion(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dockerfile, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	// A repository with what counts, and a file that is ignored.
	sources := t.TempDir()
	for _, name := range []string{"Dockerfile", ".dockerignore", ".gitignore", "Makefile", "go.mod"} {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(sources, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"docs/maps.md", "cmd/a_test.go", "bin/tandemctl"} {
		file := filepath.Join(sources, name)
		if err := errors.Join(os.Mkdir(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	run(t, sources, nil, "git", "init", "-q")
	run(t, sources, nil, "git", "add", ".")
	run(t, sources, nil, "git", "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", "a")
	run(t, sources, nil, "git", "tag", "v9.8.7")
	revision := run(t, sources, nil, "git", "rev-parse", "HEAD")[:12]

	// Stands for go run: it writes the flags of the linker.
	tools := t.TempDir()
	if err := os.WriteFile(filepath.Join(tools, "go"), []byte("#!/bin/sh\nfor last; do :; done\necho \"$last\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	var clean string
	for _, test := range []struct {
		name   string
		change func(context string) error
		env    []string
		want   []string
	}{
		{"clean", func(string) error { return nil }, nil, []string{"gitCommit=" + revision, "gitTreeState=clean", "+tandem.v9.8.7 "}},
		{"changed", func(context string) error { return os.WriteFile(filepath.Join(context, "go.sum"), nil, 0o644) }, nil, []string{"gitCommit=" + revision, "gitTreeState=dirty"}},
		{"an archive", func(context string) error { return os.RemoveAll(filepath.Join(context, ".git")) }, nil, []string{"gitCommit=unknown", "gitTreeState=archive"}},
		{"other flags", func(string) error { return nil }, []string{"LDFLAGS=-X main.version=v1"}, []string{"-X main.version=v1"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			// What COPY copies: the names in .dockerignore are plain ones.
			context := filepath.Join(t.TempDir(), "src")
			if err := os.CopyFS(context, os.DirFS(sources)); err != nil {
				t.Fatal(err)
			}
			ignored, err := os.ReadFile(filepath.Join(context, ".dockerignore"))
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(ignored)) {
				if name := strings.TrimSpace(line); name != "" && !strings.HasPrefix(name, "#") {
					if err := os.RemoveAll(filepath.Join(context, name)); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := test.change(context); err != nil {
				t.Fatal(err)
			}
			// The repository above this one is none of the image's.
			env := append([]string{"PATH=" + tools + ":" + os.Getenv("PATH"), "TARGETARCH=amd64", "GIT_CEILING_DIRECTORIES=" + filepath.Dir(context)}, test.env...)
			flags := run(t, context, env, "sh", "-c", buildStep(t, dockerfile))
			if test.name == "clean" {
				clean = flags
			}
			for _, want := range test.want {
				if !strings.Contains(flags+" ", want) {
					t.Errorf("%q is not in the flags of the linker: %s", want, flags)
				}
			}
		})
	}

	program := filepath.Join(t.TempDir(), "tandemctl")
	run(t, root, []string{"CGO_ENABLED=0"}, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags="+clean, "-o", program, "./cmd/tandemctl")
	if says, want := run(t, root, nil, program, "version"), "+tandem.v9.8.7 ("+revision+","; !strings.Contains(says, want) {
		t.Errorf("the program says %q, want %q", says, want)
	}
}
