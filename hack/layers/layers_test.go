// SPDX-License-Identifier: Apache-2.0

// Package layers holds the direction of imports: each package of the product imports only what
// stands below it.
package layers

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/tandem-proxy/tandem/"

// table says what packages may import of this module, from the bottom to the top; x/... is x and
// all below it. The first line that fits a package counts.
var table = []struct{ pkg, may string }{
	// The kernel's interfaces, which know nothing of Services, and what this kernel can do.
	{"kernel/...", "kernel/..."},
	{"capabilities", "kernel/..."},
	// What kube-proxies and the controller of ServiceLB tell each other.
	{"servicelb/nodereport", ""},
	// The model. kernel/inet has plain values.
	{"proxier/delta", ""},
	{"proxier/maglev", ""},
	{"proxier", "proxier/delta proxier/maglev kernel/inet servicelb/nodereport"},
	{"proxier/staleudp", "proxier kernel/..."},
	// Which datapath serves what, and the datapaths.
	{"proxier/placement/...", "proxier/placement/... proxier proxier/delta kernel/inet"},
	{"proxier/ebpf/lbmap", "proxier proxier/maglev kernel/..."},
	{"proxier/ebpf/writer/...", "proxier/ebpf/lbmap proxier proxier/delta proxier/maglev"},
	{"proxier/ebpf/datapath", "proxier/ebpf/lbmap proxier kernel/..."},
	{"proxier/ebpf/flowtable", "proxier/ebpf/lbmap proxier kernel/..."},
	{"proxier/ebpf/sockets", "proxier/ebpf/lbmap proxier kernel/..."},
	{"proxier/ebpf/removal", "proxier/ebpf/datapath proxier/ebpf/lbmap kernel/..."},
	{"proxier/ebpf/drain", "proxier/ebpf/removal proxier/ebpf/datapath proxier/ebpf/flowtable proxier/ebpf/lbmap kernel/..."},
	{"proxier/ebpf/successor", "proxier/ebpf/datapath proxier/ebpf/lbmap"},
	{"proxier/ebpf/direct", "proxier/ebpf/lbmap kernel/..."},
	{"proxier/ebpf/podns", "proxier kernel/..."},
	{"proxier/ebpf/optouts", "proxier/ebpf/podns proxier/ebpf/lbmap proxier"},
	{"proxier/ebpf/inspect", "proxier/ebpf/lbmap proxier/ebpf/datapath proxier/ebpf/flowtable proxier/ebpf/successor proxier kernel/..."},
	{"proxier/ebpf/sizing", "proxier/ebpf/flowtable proxier/ebpf/lbmap"},
	{"proxier/ebpf/...", "proxier/ebpf/... proxier proxier/delta kernel/..."},
	{"proxier/iptables/...", "proxier/iptables/... proxier proxier/delta proxier/staleudp kernel/..."},
	{"proxier/ipvs/...", "proxier/ipvs/... proxier/placement proxier proxier/delta kernel/..."},
	{"config", "proxier proxier/maglev kernel/inet"},
	// Where objects and facts come from, and what is told.
	{"sources/...", "sources/... config proxier kernel/... servicelb/nodereport"},
	{"observe/...", "observe/... config proxier proxier/staleudp kernel/..."},
	{"servicelb/...", "servicelb/..."},
	{"cmd/servicelb", "servicelb/..."},
	{"cmd/...", "cmd/... capabilities config kernel/... observe/... proxier/... sources/... servicelb/nodereport"},
	// What makes the image, and a program in it.
	{"deploy/image", ""},
	{"deploy/image/build", "deploy/image"},
	{"deploy/...", "kernel/xtables"},
}

// pure packages know of no kernel library.
var (
	pure      = "proxier proxier/delta proxier/maglev proxier/placement/... config"
	libraries = "github.com/cilium/ebpf/... github.com/vishvananda/netlink/... github.com/vishvananda/netns/... github.com/moby/ipvs/... github.com/coreos/go-iptables/... golang.org/x/sys/..."
)

// fits reports whether a package is one of a list.
func fits(pkg, list string) bool {
	for _, pattern := range strings.Fields(list) {
		folder, below := strings.CutSuffix(pattern, "/...")
		if pkg == folder || below && strings.HasPrefix(pkg, folder+"/") {
			return true
		}
	}
	return false
}

// forTests reports whether a package is there for tests alone, as httptest is: iptablestest.
func forTests(pkg string) bool { return strings.HasSuffix(pkg, "test") }

// wrong says what is wrong with an import; nothing if it is allowed.
func wrong(pkg, imported string) string {
	ours, internal := strings.CutPrefix(imported, module)
	if forTests(pkg) {
		return ""
	}
	if internal && forTests(ours) {
		return "is none for tests"
	}
	if !internal {
		if fits(pkg, pure) && fits(imported, libraries) {
			return "has to do without libraries of the kernel"
		}
		return ""
	}
	for _, line := range table {
		if fits(pkg, line.pkg) {
			if fits(ours, line.may) {
				return ""
			}
			return "may import of this module: " + line.may
		}
	}
	return "has no line in the table"
}

// TestImports reads the files of the product, for all systems and architectures.
func TestImports(t *testing.T) {
	root := filepath.Join("..", "..")
	files, packages := 0, map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := filepath.ToSlash(path[len(root):])
		if d.IsDir() {
			if name == "/hack" || name == "/test" || name == "/bin" || d.Name() == "testdata" || name != "" && strings.HasPrefix(d.Name(), ".") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		pkg := strings.TrimPrefix(filepath.ToSlash(filepath.Dir(name)), "/")
		files++
		packages[pkg] = true
		for _, spec := range f.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			if why := wrong(pkg, imported); why != "" {
				t.Errorf("%s imports %s: %s %s", name[1:], imported, pkg, why)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 100 || !packages["proxier"] || !packages["kernel/inet"] {
		t.Errorf("only %d files in %d packages were read", files, len(packages))
	}
}

// TestWrong: the table forbids what it is there for.
func TestWrong(t *testing.T) {
	for _, test := range []struct {
		pkg, imported string
		allowed       bool
	}{
		{"proxier", "proxier/delta", true},
		{"proxier", "kernel/inet", true},
		{"proxier", "kernel/netlink", false},
		{"proxier", "proxier/ebpf", false},
		{"proxier/delta", "proxier", false},
		{"proxier/placement", "proxier/iptables", false},
		{"proxier/ebpf/writer", "proxier/ebpf/lbmap", true},
		{"proxier/ebpf/lbmap", "proxier/ebpf/writer", false},
		{"proxier/ebpf/datapath", "proxier/ebpf/flowtable", false},
		{"proxier/ebpf/inspect", "proxier/ebpf/datapath", true},
		{"proxier/ebpf/writer", "proxier/iptables", false},
		{"proxier/ebpf", "capabilities", false},
		{"proxier/iptables", "proxier/ipvs", false},
		{"proxier/ipvs", "proxier/iptables", false},
		{"kernel/xtables", "kernel/inet", true},
		{"kernel/xtables", "proxier", false},
		{"capabilities", "proxier", false},
		{"config", "proxier/ebpf", false},
		{"sources/nodefacts", "config", true},
		{"sources/apiserver", "observe/events", false},
		{"observe/metrics", "sources/apiserver", false},
		{"cmd/tandemctl", "proxier/ebpf/inspect", true},
		{"cmd/tandemctl", "test/lab", false},
		{"proxier/iptables/iptablestest", "test/netfilter", true},
		{"proxier/iptables", "proxier/iptables/iptablestest", false},
		{"elsewhere", "proxier", false},
	} {
		if why := wrong(test.pkg, module+test.imported); (why == "") != test.allowed {
			t.Errorf("%s imports %s: %q, want allowed = %v", test.pkg, test.imported, why, test.allowed)
		}
	}
	for _, library := range []string{"github.com/cilium/ebpf", "github.com/cilium/ebpf/link", "github.com/vishvananda/netlink", "github.com/moby/ipvs", "github.com/coreos/go-iptables/iptables", "golang.org/x/sys/unix"} {
		if wrong("proxier", library) == "" || wrong("proxier/ebpf", library) != "" {
			t.Errorf("%s: proxier %q, proxier/ebpf %q", library, wrong("proxier", library), wrong("proxier/ebpf", library))
		}
	}
}
