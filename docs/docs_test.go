// SPDX-License-Identifier: Apache-2.0

// Package docs checks the pages: that their links lead somewhere, and that what the code
// cites is on them.
package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const root = ".."

// pages are all Markdown files of the repository, by their path from its root.
func pages(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	walk(t, func(path string, text []byte) { found[path] = string(text) }, ".md")
	return found
}

// walk calls visit with the files of the repository that have one of the extensions.
func walk(t *testing.T, visit func(path string, text []byte), extensions ...string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := entry.Name(); entry.IsDir() {
			if path != root && (strings.HasPrefix(name, ".") || name == "bin") {
				return filepath.SkipDir
			}
			return nil
		}
		for _, extension := range extensions {
			if filepath.Ext(path) != extension {
				continue
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			relative, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			visit(relative, text)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	fenced  = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	code    = regexp.MustCompile("`[^`\n]*`")
	heading = regexp.MustCompile(`(?m)^#{1,6} +(.+?) *$`)
	named   = regexp.MustCompile(`<a id="([^"]+)">`)
	// Links by reference, and what the references lead to.
	refers   = regexp.MustCompile(`\]\[([a-z0-9-]+)\]`)
	referred = regexp.MustCompile(`(?m)^\[([a-z0-9-]+)\]: \S+$`)
	notSlug  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	// A table may say in a comment of code what it shows: `docs/maps.md`.
	mention = regexp.MustCompile(`\bdocs/[a-z-]+\.md(?:#[a-z0-9-]+)?`)
)

// anchors are what links can point to on a page, as GitHub makes them.
func anchors(text string) map[string]bool {
	found := map[string]bool{"": true}
	text = fenced.ReplaceAllString(text, "")
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		title := regexp.MustCompile(`\[([^]]*)\]\([^)]*\)`).ReplaceAllString(m[1], "$1")
		slug := strings.ReplaceAll(notSlug.ReplaceAllString(strings.ToLower(title), ""), " ", "-")
		found[slug] = true
	}
	for _, m := range named.FindAllStringSubmatch(text, -1) {
		found[m[1]] = true
	}
	return found
}

// firsts are what the first group of an expression matches in a text.
func firsts(expression *regexp.Regexp, text string) map[string]bool {
	found := map[string]bool{}
	for _, m := range expression.FindAllStringSubmatch(text, -1) {
		found[m[1]] = true
	}
	return found
}

// TestLinks: every link within the repository leads to a file, and to a heading of it.
func TestLinks(t *testing.T) {
	all := pages(t)
	check := func(from, target string) {
		path, anchor, _ := strings.Cut(target, "#")
		to := from
		if path != "" {
			to = filepath.Join(filepath.Dir(from), path)
		}
		if text, isPage := all[to]; isPage {
			if !anchors(text)[anchor] {
				t.Errorf("%s: %s: there is no such heading", from, target)
			}
			return
		}
		if _, err := os.Stat(filepath.Join(root, to)); err != nil {
			t.Errorf("%s: %s: there is no such file", from, target)
		}
	}
	links := 0
	for from, text := range all {
		text = code.ReplaceAllString(fenced.ReplaceAllString(text, ""), "")
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if !strings.Contains(m[1], "://") {
				links++
				check(from, m[1])
			}
		}
		if d := cmp.Diff(firsts(refers, text), firsts(referred, text)); d != "" {
			t.Errorf("%s: references (-used +defined):\n%s", from, d)
		}
	}
	if links < 100 {
		t.Errorf("found only %d links", links)
	}
	// Code and charts name pages by their path from the root.
	walk(t, func(path string, text []byte) {
		for _, m := range mention.FindAllString(string(text), -1) {
			page, anchor, _ := strings.Cut(m, "#")
			if text, isPage := all[page]; !isPage || !anchors(text)[anchor] {
				t.Errorf("%s: %s: there is no such page or heading", path, m)
			}
		}
	}, ".go", ".c", ".h", ".sh", ".yaml", ".json", ".txtar")
}

// TestComparison: every cell of the README's comparison with other proxies links to its source.
func TestComparison(t *testing.T) {
	_, table, _ := strings.Cut(pages(t)["README.md"], "\n| | Tandem | kube-proxy, `nftables` | Cilium |")
	table, _, found := strings.Cut(table, "\n\n")
	if !found {
		t.Fatal("README.md has no comparison with Cilium")
	}
	rows := strings.Split(table, "\n")[2:] // below the head and its line
	for _, row := range rows {
		cells := strings.Split(strings.Trim(row, "| "), " | ")
		if len(cells) != 6 {
			t.Errorf("README.md: %d cells, want 6: %s", len(cells), row)
		}
		for _, cell := range cells[1:] {
			if cell != "–" && !link.MatchString(cell) && !refers.MatchString(cell) {
				t.Errorf("README.md: comparison, %s: %q has no source", cells[0], cell)
			}
		}
	}
	if len(rows) < 6 {
		t.Errorf("README.md: the comparison has only %d rows", len(rows))
	}
}

// TestTryIt: the commands that the README has for a cluster are those of docs/install.md. Blocks of that page are what
// test/install plays, and it plays commands in its text if it has them as well.
func TestTryIt(t *testing.T) {
	const image = "registry.internal.example/tandem:v1" // for which the page has a variable
	all := pages(t)
	played, err := os.ReadFile("../test/install/daemonset_test.go")
	if err != nil {
		t.Fatal(err)
	}
	// commands are those of a line: what is behind "# then:" is one too, other comments are not.
	commands := func(line string) []string {
		command, comment, _ := strings.Cut(strings.TrimSpace(line), " # ")
		if second, ok := strings.CutPrefix(comment, "then: "); ok {
			return []string{strings.TrimSpace(command), second}
		}
		return []string{strings.TrimSpace(command)}
	}
	has := map[string]bool{}
	for _, block := range fenced.FindAllString(all["docs/install.md"], -1) {
		for line := range strings.Lines(block) {
			for _, command := range commands(line) {
				has[command] = true
			}
		}
	}
	for _, span := range code.FindAllString(fenced.ReplaceAllString(all["docs/install.md"], ""), -1) {
		if command := strings.Trim(span, "`"); strings.Contains(string(played), `("`+command+`"`) {
			has[command] = true
		}
	}
	if !has["IMAGE="+image] {
		t.Errorf("docs/install.md does not say that $IMAGE is %s", image)
	}
	_, section, _ := strings.Cut(all["README.md"], "\nOn a cluster that kubeadm made")
	section, _, _ = strings.Cut(section, "\n## ")
	blocks := fenced.FindAllString(section, -1)
	if len(blocks) != 2 {
		t.Fatalf("README.md has %d blocks of commands for a cluster, want one to try Tandem and one to leave it", len(blocks))
	}
	for _, block := range blocks {
		lines := strings.Split(strings.Trim(block, "`\n"), "\n")
		if len(lines) != 3 {
			t.Errorf("README.md has %d commands, want 3:\n%s", len(lines), block)
		}
		for _, line := range lines {
			for _, command := range commands(line) {
				if !has[strings.ReplaceAll(command, image, "$IMAGE")] {
					t.Errorf("README.md: docs/install.md does not have %q as a command that test/install plays", command)
				}
			}
		}
	}
}

// TestClaims: every item of a list and every row of a table of the README links to what shows it.
func TestClaims(t *testing.T) {
	text, _, found := strings.Cut(pages(t)["README.md"], "\n## Documentation\n")
	if !found {
		t.Fatal("README.md has no section Documentation")
	}
	item := regexp.MustCompile(`(?m)^- .*(?:\n  .*)*`)
	row := regexp.MustCompile(`(?m)^\| ?[^ |-].*\|$`) // but for the line below the head
	text = fenced.ReplaceAllString(text, "")
	claims := item.FindAllString(text, -1)
	for _, table := range regexp.MustCompile(`(?m)(?:^\|.*\n)+`).FindAllString(text, -1) {
		_, body, _ := strings.Cut(table, "\n")
		claims = append(claims, row.FindAllString(body, -1)...)
	}
	for _, claim := range claims {
		if !link.MatchString(claim) && !refers.MatchString(claim) {
			t.Errorf("README.md: nothing shows this:\n%s", claim)
		}
	}
	if len(claims) < 50 {
		t.Errorf("found only %d claims", len(claims))
	}
}

// TestNames: tests, benchmarks and fuzz targets that pages name exist; where the name is a link, in what it leads to.
func TestNames(t *testing.T) {
	declared, all := map[string][]string{}, pages(t)
	function := regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz)[A-Z]\w*)\(`)
	walk(t, func(path string, text []byte) {
		for _, m := range function.FindAllSubmatch(text, -1) {
			declared[string(m[1])] = append(declared[string(m[1])], path)
		}
	}, ".go")
	exists := func(name, below string) bool {
		// … and * stand for any rest.
		expression := regexp.MustCompile("^" + strings.NewReplacer("…", `\w*`, "*", `\w*`).Replace(name) + "$")
		for name, paths := range declared {
			if expression.MatchString(name) && slices.ContainsFunc(paths, func(path string) bool { return strings.HasPrefix(path, below) }) {
				return true
			}
		}
		return false
	}
	named := regexp.MustCompile(`(-run[ =])?\b((?:Test|Benchmark|Fuzz)(?:[A-Z]\w*(?:…\w*|\*)?|…\w+))`)
	linked := regexp.MustCompile(`\[([^]]*)\]\(([^()\s]+_test\.go)\)`)
	count := 0
	for from, text := range all {
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			count++
			name := m[2]
			if m[1] != "" { // go test takes a part of the name
				name += "*"
			}
			if !exists(name, "") {
				t.Errorf("%s names %s, which no file declares", from, name)
			}
		}
		for _, m := range linked.FindAllStringSubmatch(text, -1) {
			for _, name := range named.FindAllString(m[1], -1) {
				if to := filepath.Join(filepath.Dir(from), m[2]); !exists(name, to) {
					t.Errorf("%s: %s does not declare %s", from, to, name)
				}
			}
		}
	}
	if count < 100 {
		t.Errorf("found only %d names", count)
	}
}

// TestStatements: every number that code, tests or pages cite is defined on a page. S and C
// are statements about Services and configuration, I are invariants.
func TestStatements(t *testing.T) {
	all := pages(t)
	semantics, invariants := anchors(all["docs/semantics.md"]), anchors(all["docs/invariants.md"])
	cited := regexp.MustCompile(`\b(?:[SCMU][0-9]{2,3}|I[0-9])\b`)
	count := 0
	check := func(path string, text []byte) {
		for _, number := range cited.FindAllString(string(text), -1) {
			count++
			defined := semantics
			if number[0] == 'I' {
				defined = invariants
			}
			if !defined[strings.ToLower(number)] {
				t.Errorf("%s cites %s, which no page defines", path, number)
			}
		}
	}
	walk(t, check, ".go", ".c", ".h", ".txtar", ".md")
	if count < 100 {
		t.Errorf("found only %d citations", count)
	}
}

// TestPackages: docs/architecture.md names every package of the product.
func TestPackages(t *testing.T) {
	_, section, _ := strings.Cut(pages(t)["docs/architecture.md"], "\n## Packages\n")
	section, _, found := strings.Cut(section, "\n## ")
	if !found {
		t.Fatal("docs/architecture.md has no section Packages")
	}
	folders := map[string]bool{}
	walk(t, func(path string, _ []byte) {
		folders[filepath.Dir(path)] = !strings.HasSuffix(path, "_test.go") || folders[filepath.Dir(path)]
	}, ".go")
	for folder, hasCode := range folders {
		if name := filepath.Base(folder); strings.HasSuffix(name, "test") || name == "integration" {
			continue // what tests of the package above it share
		}
		// By its path, by its name, or as kube-proxy/app.
		named := regexp.MustCompile("`(" + folder + "/?|" + filepath.Base(folder) + "|" + strings.TrimPrefix(folder, "cmd/") + ")`")
		if top, _, _ := strings.Cut(folder, "/"); hasCode && top != "deploy" && top != "hack" && top != "test" && !named.MatchString(section) {
			t.Errorf("docs/architecture.md does not name package %s", folder)
		}
	}
}

// quoted are texts of the programs that pages tell operators to look for.
var quoted = []struct{ page, text string }{
	{"docs/install.md", "no program of Tandem is attached"},
	{"docs/install.md", "ProxyModeFallback"},
	{"docs/preflight.md", "service ports; interrupt to end early"},
	{"docs/processes.md", "ProxyModeFallback"},
	{"docs/processes.md", "IncompleteNode"},
	{"docs/configuration.md", "InvalidConfig"},
	{"docs/semantics.md", "FailedToStartServiceHealthcheck"},
	{"docs/semantics.md", "Unguarded"},
	{"docs/ebpf.md", "tdm_connect4"},
	{"docs/processes.md", "KUBE-PROXY-DRAIN"},
	{"docs/processes.md", "KUBE-IPVS-DRAIN"},
	{"docs/troubleshooting.md", "FailedToStartMetricServer"},
	{"docs/troubleshooting.md", "FailedToStartProxierHealthcheck"},
	{"docs/troubleshooting.md", "VirtualServerRefused"},
	{"docs/troubleshooting.md", "RulesRefused"},
}

// logged are log lines that a page quotes: in prose, or for grep.
func logged(page string) (lines []string) {
	for _, m := range regexp.MustCompile(`\blog(?: line)? \("([^"]+)"`).FindAllStringSubmatch(page, -1) {
		lines = append(lines, m[1])
	}
	for _, m := range regexp.MustCompile(`\blogs\b.*\| grep (?:-E )?'([^']+)'`).FindAllStringSubmatch(page, -1) {
		lines = append(lines, strings.Split(m[1], "|")...)
	}
	return lines
}

// TestQuotedTexts: what pages quote is what the programs print.
func TestQuotedTexts(t *testing.T) {
	type quote struct {
		text string
		log  bool
	}
	all, prints := pages(t), map[quote]*regexp.Regexp{}
	for _, q := range quoted {
		if !strings.Contains(all[q.page], q.text) {
			t.Errorf("%s does not quote %q", q.page, q.text)
		}
		prints[quote{text: q.text}] = regexp.MustCompile(regexp.QuoteMeta(q.text))
	}
	lines := 0
	for _, page := range all {
		for _, line := range logged(page) {
			lines++
			prints[quote{line, true}] = regexp.MustCompile(`\b(?:Info|Error)\([^"\n]*"[^"\n]*` + regexp.QuoteMeta(line))
		}
	}
	if lines < 6 {
		t.Errorf("found only %d quoted log lines", lines)
	}
	walk(t, func(path string, text []byte) {
		maps.DeleteFunc(prints, func(_ quote, print *regexp.Regexp) bool {
			return !strings.HasSuffix(path, "_test.go") && print.Match(text)
		})
	}, ".go", ".c")
	for q := range prints {
		t.Errorf("pages quote %q, which no program prints", q.text)
	}
}

// TestEvents: docs/troubleshooting.md explains every reason that an Event or a problem can have.
func TestEvents(t *testing.T) {
	page := pages(t)["docs/troubleshooting.md"]
	handlers, err := os.ReadFile("../proxier/handlers.go")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^\tReason\w+ += "(\w+)"`).FindAllStringSubmatch(string(handlers), -1)
	if len(found) < 10 {
		t.Errorf("found only %d reasons", len(found))
	}
	for _, m := range found {
		if !strings.Contains(page, "`"+m[1]+"`") {
			t.Errorf("docs/troubleshooting.md does not explain %s", m[1])
		}
	}
}

// TestMaps: docs/maps.md has every map and every program.
func TestMaps(t *testing.T) {
	page := pages(t)["docs/maps.md"]
	declared := regexp.MustCompile(`(?m)^} (tdm_\w+) SEC\("\.maps"\)|^int (tdm_\w+)\(`)
	count := 0
	walk(t, func(path string, text []byte) {
		for _, m := range declared.FindAllStringSubmatch(string(text), -1) {
			count++
			if name := m[1] + m[2]; !strings.Contains(page, "`"+name+"`") {
				t.Errorf("docs/maps.md does not have %s, of %s", name, path)
			}
		}
	}, ".h", ".c")
	if count < 30 {
		t.Errorf("found only %d maps and programs", count)
	}
}

// TestVersions compares the versions of Kubernetes in compatibility.md with the releases whose
// feature gates are known, and with the control plane of test/cluster.
func TestVersions(t *testing.T) {
	read := func(path string) string {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	page, gates, cluster := read("compatibility.md"), read("../config/gates.txt"), read("../test/cluster/go.mod")
	releases := regexp.MustCompile(`v1\.\d+\.\d+`)
	var known []string
	for line := range strings.Lines(gates) {
		if strings.HasPrefix(line, "# From ") {
			known = releases.FindAllString(line, -1)
		}
	}
	if len(known) != 4 {
		t.Fatalf("config/gates.txt is from %v, want four releases", known)
	}
	controlPlane := regexp.MustCompile(`k8s\.io/kubernetes (v\S+)`).FindStringSubmatch(cluster)[1]
	for _, release := range known {
		minor := release[1:strings.LastIndexByte(release, '.')]
		row := regexp.MustCompile(`(?m)^\| ` + regexp.QuoteMeta(minor) + ` \| those of (\S+) \|.*\| (.*) \|$`).FindStringSubmatch(page)
		if row == nil || row[1] != release {
			t.Errorf("compatibility.md does not say that gates of %s are those of %s", minor, release)
			continue
		}
		if tested := strings.HasPrefix(controlPlane, "v"+minor+"."); tested != (row[2] == controlPlane) {
			t.Errorf("compatibility.md says %q of a control plane of %s; test/cluster has %s", row[2], minor, controlPlane)
		}
	}
}

// TestKinds: docs/troubleshooting.md names every kind of object that tandemctl prints, and no other.
func TestKinds(t *testing.T) {
	_, section, found := strings.Cut(pages(t)["docs/troubleshooting.md"], "\n## Output for machines\n")
	if !found {
		t.Fatal("docs/troubleshooting.md has no section about output for machines")
	}
	named, printed := map[string]bool{}, map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| [^|]*\\| `(\\w+)` \\|").FindAllStringSubmatch(section, -1) {
		named[row[1]] = true
	}
	walk(t, func(path string, text []byte) {
		if strings.HasPrefix(path, "cmd/tandemctl/") && !strings.HasSuffix(path, "_test.go") {
			for _, call := range regexp.MustCompile(`(?:write(?:Data|Stream)\(|\bkind: )"(\w+)"`).FindAllSubmatch(text, -1) {
				printed[string(call[1])] = true
			}
		}
	}, ".go")
	if len(printed) == 0 || !maps.Equal(named, printed) {
		t.Errorf("the page names %v, tandemctl prints %v", slices.Sorted(maps.Keys(named)), slices.Sorted(maps.Keys(printed)))
	}
}

// TestDocsCheck: make docs-check runs every test that compares pages with what they are about. Left out are those that need
// a cluster, or upstream's binary.
func TestDocsCheck(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	_, recipe, _ := strings.Cut(string(makefile), "\ndocs-check:")
	recipe, _, _ = strings.Cut(recipe, "\n\n")
	leftOut := []string{"test/e2e", "test/install", "test/upstream"}
	// It plays scenarios with upstream's binary, and takes from a page which of its answers differ.
	const leftOutTest = "TestShadowScenarios"
	page := regexp.MustCompile(`"[^"\n]*(?:/docs/[a-z-]+|/README)\.md"`)
	filter := regexp.MustCompile(`-run '([^']*)'`)
	packages := map[string]bool{}
	walk(t, func(path string, text []byte) {
		folder := filepath.Dir(path)
		if !strings.HasSuffix(path, "_test.go") || slices.Contains(leftOut, folder) {
			return
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			if !page.Match(text[d.Pos()-file.FileStart : d.End()-file.FileStart]) {
				continue
			}
			packages[folder] = true
			name := "what is declared outside functions" // any test may read it
			if f, ok := d.(*ast.FuncDecl); ok {
				name = f.Name.Name
			}
			runs := func(line string) bool {
				run := filter.FindStringSubmatch(line)
				return slices.Contains(strings.Fields(line), "./"+folder) && (run == nil || regexp.MustCompile(run[1]).MatchString(name))
			}
			if name != leftOutTest && !slices.ContainsFunc(strings.Split(recipe, "\n"), runs) {
				t.Errorf("make docs-check does not run %s of ./%s, which reads a page", name, folder)
			}
		}
	}, ".go")
	if len(packages) < 6 {
		t.Errorf("found only %d packages", len(packages))
	}
}
