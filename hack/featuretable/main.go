// SPDX-License-Identifier: Apache-2.0

// Command featuretable writes docs/kernels.md: what tandemctl found under each kernel, and
// what the programs cost there.
//
//	featuretable <directory> <kernel>...
//
// The directory has <kernel>.json of tandemctl and <kernel>.sizes, the lines of
// TestProgramSizes.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

type report struct {
	Kernel   string
	Features []feature
	sizes    []size
}

type feature struct {
	Feature, State, Description, Without string
}

type size struct{ program, verified, jited string }

func main() {
	var reports []report
	for _, kernel := range os.Args[2:] {
		r, err := read(filepath.Join(os.Args[1], kernel))
		if err != nil {
			fmt.Fprintf(os.Stderr, "featuretable: %v\n", err)
			os.Exit(1)
		}
		reports = append(reports, r)
	}
	write(os.Stdout, reports)
}

func read(path string) (r report, err error) {
	text, err := os.ReadFile(path + ".json")
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("%s.json: %w", path, err)
	}
	text, err = os.ReadFile(path + ".sizes")
	r.sizes = sizes(text)
	return r, err
}

// Debian's releases end alike, and the test prints its place before each size.
var (
	flavour  = regexp.MustCompile(`-cloud-amd64$`)
	sizeLine = regexp.MustCompile(`(tdm_\S+(?: \S+)?) +(\d+) instructions verified +(\d+) bytes`)
)

func sizes(text []byte) (list []size) {
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		if m := sizeLine.FindStringSubmatch(lines.Text()); m != nil {
			list = append(list, size{m[1], m[2], m[3]})
		}
	}
	return list
}

func write(out io.Writer, reports []report) {
	fmt.Fprint(out, `# Kernels

`+"`hack/features.sh`"+` writes this page. It runs the proxy's probes on each kernel in a virtual machine
([testing.md](testing.md#other-kernels)). An empty cell is a missing feature. On a node the proxy probes each feature when
it starts, and never concludes one from a version. [kernel-requirements.md](kernel-requirements.md) says what they are for.

`)
	row := func(cells ...string) { fmt.Fprintf(out, "| %s |\n", strings.Join(cells, " | ")) }
	head := func(first ...string) {
		cells := first
		for _, r := range reports {
			cells = append(cells, flavour.ReplaceAllString(r.Kernel, ""))
		}
		row(cells...)
		fmt.Fprintf(out, "|%s\n", strings.Repeat("---|", len(cells)))
	}

	var everywhere []string
	head("Feature", "Without it")
	for _, f := range reports[0].Features {
		var cells []string
		for _, r := range reports {
			i := slices.IndexFunc(r.Features, func(g feature) bool { return g.Feature == f.Feature })
			switch {
			case i < 0 || r.Features[i].State == "inconclusive":
				cells = append(cells, "?")
			case r.Features[i].State == "yes":
				cells = append(cells, "yes")
			default:
				cells = append(cells, "")
			}
		}
		if slices.Contains(cells, "") || slices.Contains(cells, "?") {
			row(append([]string{fmt.Sprintf("`%s`: %s", f.Feature, f.Description), f.Without}, cells...)...)
		} else {
			everywhere = append(everywhere, "`"+f.Feature+"`")
		}
	}
	fmt.Fprintf(out, "\nEvery kernel above has %s.\n", strings.Join(everywhere, ", "))

	fmt.Fprint(out, `
## Programs

Number of instructions that the verifier processed, and bytes of machine code, for each program, with default map sizes and
every feature that the kernel has. Linux before 5.16 does not report the former. A cell is empty where the programs
cannot be loaded.

`)
	head("Program")
	var names []string
	for _, r := range reports {
		for _, s := range r.sizes {
			if !slices.Contains(names, s.program) {
				names = append(names, s.program)
			}
		}
	}
	for _, name := range names {
		cells := []string{"`" + name + "`"}
		for _, r := range reports {
			i := slices.IndexFunc(r.sizes, func(s size) bool { return s.program == name })
			switch {
			case i < 0:
				cells = append(cells, "")
			case r.sizes[i].verified == "0":
				cells = append(cells, r.sizes[i].jited+" B")
			default:
				cells = append(cells, r.sizes[i].verified+", "+r.sizes[i].jited+" B")
			}
		}
		row(cells...)
	}
}
