// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/capabilities"
)

// linux is a version of Linux, by its first two numbers.
type linux struct{ major, minor int }

func (v linux) String() string { return fmt.Sprintf("%d.%d", v.major, v.minor) }

func (v linux) compare(w linux) int {
	if v.major != w.major {
		return v.major - w.major
	}
	return v.minor - w.minor
}

func versionOf(t *testing.T, text string) (v linux) {
	t.Helper()
	if _, err := fmt.Sscanf(text, "%d.%d", &v.major, &v.minor); err != nil {
		t.Fatalf("%q is no version of Linux: %v", text, err)
	}
	return v
}

// sinceOf is the first version with a feature.
func sinceOf(t *testing.T, f capabilities.Feature) linux {
	t.Helper()
	info, known := capabilities.Describe(f)
	if !known || info.Since == "-" {
		t.Fatalf("no version of Linux is known to be the first with %q", f)
	}
	return versionOf(t, info.Since)
}

// newerThan are the features that a version lacks.
func newerThan(t *testing.T, v linux) map[capabilities.Feature]capabilities.State {
	t.Helper()
	newer, err := capabilities.ParseMask("linux=" + v.String())
	if err != nil {
		t.Fatal(err)
	}
	return newer
}

// tables are the cells of the tables of a page, the heads first.
func tables(page string) (list [][][]string) {
	for _, text := range regexp.MustCompile(`(?m)(?:^\|.*\n)+`).FindAllString(page, -1) {
		var rows [][]string
		for line := range strings.Lines(text) {
			cells := strings.Split(strings.Trim(line, "|\n"), "|")
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			if !strings.HasPrefix(cells[0], "---") {
				rows = append(rows, cells)
			}
		}
		list = append(list, rows)
	}
	return list
}

var (
	coded   = regexp.MustCompile("`([a-z0-9_]+)`")
	version = regexp.MustCompile(`\b\d+\.\d+\b`)
)

var armVersion = regexp.MustCompile(`\barm64 (\d+\.\d+)\b`)

// rowWith is the row of a table that has a text in one of its first two cells.
func rowWith(t *testing.T, rows [][]string, text string) []string {
	t.Helper()
	for _, row := range rows {
		if strings.Contains(row[0]+row[1], text) {
			return row
		}
	}
	t.Fatalf("docs/kernel-requirements.md has no row with %s", text)
	return nil
}

// checkUnprobed compares rows of features without a probe with what the code says of them.
func checkUnprobed(t *testing.T, rows [][]string) {
	t.Helper()
	for _, test := range []struct{ feature, file, says string }{
		{"`SO_NETNS_COOKIE`", "../kernel/netns/cookie.go", "%w before Linux %s\""},
		{"`bpf_get_func_arg`", "../cmd/tandemctl/monitor.go", "It needs Linux %s\non x86-64, %s on arm64."},
	} {
		row := rowWith(t, rows, test.feature)
		numbers := version.FindAllString(row[2], -1)
		text, err := os.ReadFile(test.file)
		if err != nil {
			t.Fatal(err)
		}
		says := test.says
		for _, n := range numbers {
			says = strings.Replace(says, "%s", n, 1)
		}
		if !strings.Contains(string(text), says) {
			t.Errorf("docs/kernel-requirements.md: %s: Linux %s; %s does not say %q", row[0], row[2], test.file, says)
		}
	}
}

// TestKernels compares what docs/kernel-requirements.md says with what package capabilities knows, and both with what the
// runs behind docs/kernels.md found.
func TestKernels(t *testing.T) {
	all := pages(t)
	found := tables(all["docs/kernels.md"])
	if len(found) != 2 {
		t.Fatalf("docs/kernels.md has %d tables, want features and programs", len(found))
	}
	features, programs := found[0], found[1]
	_, everywhere, _ := strings.Cut(all["docs/kernels.md"], "\nEvery kernel above has ")
	everywhere, _, _ = strings.Cut(everywhere, "\n")

	early := map[string]bool{} // what was found before the version that is known to be the first
	var oldest linux
	var run, none []linux // those that load all programs, and those that load none
	for column, head := range features[0] {
		if column < 2 { // the feature, and what it means to lack it
			continue
		}
		v := versionOf(t, head)
		if column == 2 || v.compare(oldest) < 0 {
			oldest = v
		}
		newer, has := newerThan(t, v), firsts(coded, everywhere)
		for _, row := range features[1:] {
			name := coded.FindStringSubmatch(row[0])[1]
			has[name] = row[column] == "yes"
			if _, lacks := newer[capabilities.Feature(name)]; !lacks && !has[name] {
				t.Errorf("docs/kernels.md: %s was not found on %s, which has it by package capabilities", name, head)
			}
		}
		for f := range newer {
			if has[string(f)] {
				early[fmt.Sprintf("`%s` in %s", f, v)] = true
			}
		}
		loaded := 0
		for _, row := range programs[1:] {
			if row[column-1] != "" {
				loaded++
			}
		}
		switch loaded {
		case len(programs) - 1:
			run = append(run, v)
		case 0:
			none = append(none, v)
		default:
			t.Errorf("docs/kernels.md: %s loads %d of %d programs", head, loaded, len(programs)-1)
		}
	}

	page := all["docs/kernel-requirements.md"]
	explained, rows := map[capabilities.Feature]bool{}, tables(page)[0][1:]
	var recommended linux // that with every feature that is probed
	for _, row := range rows {
		var newest linux
		for name := range firsts(coded, row[1]) {
			f := capabilities.Feature(name)
			explained[f] = true
			if since := sinceOf(t, f); since.compare(newest) > 0 {
				newest = since
			}
		}
		if newest.compare(recommended) > 0 {
			recommended = newest
		}
		if row[1] != "" && versionOf(t, row[2]) != newest {
			t.Errorf("docs/kernel-requirements.md: %s: Linux %s, and %s by package capabilities", row[0], row[2], newest)
		}
	}
	if d := cmp.Diff(firsts(regexp.MustCompile("(`[a-z_]+` in [0-9.]+[0-9])"), page), early); d != "" {
		t.Errorf("docs/kernel-requirements.md, of features in stable releases (-said +found):\n%s", d)
	}
	needs := oldest // what mode ebpf cannot do without
	for f := range newerThan(t, oldest) {
		if !explained[f] {
			t.Errorf("docs/kernel-requirements.md does not say what lacks without %s", f)
		}
		if info, _ := capabilities.Describe(f); slices.Contains(info.RequiredBy, capabilities.ModeEBPF) && sinceOf(t, f).compare(needs) > 0 {
			needs = sinceOf(t, f)
		}
	}
	checkUnprobed(t, rows)
	// All clients are served by packet programs, and with the host's own sockets told from those of pods.
	packets, cookie := rowWith(t, rows, "`"+string(capabilities.Atomics)+"`"), rowWith(t, rows, "`SO_NETNS_COOKIE`")
	everyone, arm64 := versionOf(t, cookie[2]), armVersion.FindStringSubmatch(packets[2])
	if v := versionOf(t, packets[2]); v.compare(everyone) > 0 {
		everyone = v
	}
	if arm64 == nil {
		t.Fatal("docs/kernel-requirements.md does not say which version packet programs need on arm64")
	}
	short := fmt.Sprintf("In short: Linux %s for Services at the sockets of this node, %s (arm64: %s) for all clients, %s recommended,", needs, everyone, arm64[1], recommended)
	if !strings.Contains(page, short) {
		t.Errorf("docs/kernel-requirements.md does not say %q", short)
	}
	for name, quotes := range map[string][]string{
		"docs/kernel-requirements.md": {fmt.Sprintf("Mode `ebpf` needs Linux %s or newer", needs)},
		"README.md": {
			fmt.Sprintf("**Requirements of mode `ebpf`:** Linux %s or newer (%s to keep connections of a previous kube-proxy;", needs, sinceOf(t, capabilities.ConntrackLookup)),
			fmt.Sprintf("| [%s](docs/kernel-requirements.md) |", needs),
		},
	} {
		for _, want := range quotes {
			if !strings.Contains(all[name], want) {
				t.Errorf("%s does not say %q", name, want)
			}
		}
	}

	_, tested, _ := strings.Cut(page, "\n## Tested kernels\n")
	saying := func(sentence string) (list []linux) {
		for _, v := range version.FindAllString(regexp.MustCompile(sentence).FindString(tested), -1) {
			list = append(list, versionOf(t, v))
		}
		return list
	}
	if d := cmp.Diff(saying("\\(`make test-kernels`\\) runs on .*\\."), run, cmp.AllowUnexported(linux{})); d != "" {
		t.Errorf("versions that docs/kernel-requirements.md calls tested, and those that load all programs in docs/kernels.md (-said +found):\n%s", d)
	}
	if d := cmp.Diff(saying(`On\s+\S+ the tests run that load no programs`), none, cmp.AllowUnexported(linux{})); d != "" {
		t.Errorf("versions that docs/kernel-requirements.md says load no programs, and docs/kernels.md (-said +found):\n%s", d)
	}
	// The kernel that runs everything is not in a virtual machine; TestProgramSizes records its programs.
	for _, v := range saying(`Every test suite runs on Linux [0-9.]+`) {
		file := fmt.Sprintf("../proxier/ebpf/testdata/programs-%s-amd64.txt", v)
		recorded, err := os.ReadFile(file)
		if err != nil {
			t.Errorf("docs/kernel-requirements.md says that every suite runs on Linux %s: %v", v, err)
		}
		names := map[string]bool{}
		for _, row := range programs[1:] {
			names[strings.Trim(row[0], "`")] = true
		}
		if d := cmp.Diff(firsts(regexp.MustCompile(`(?m)^(tdm_\S+(?: \S+)?) {2,}`), string(recorded)), names); d != "" {
			t.Errorf("programs of %s, and of docs/kernels.md (-recorded +found):\n%s", file, d)
		}
	}
}
