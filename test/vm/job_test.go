// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestOutputs(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"x.test -test.run=TestA -test.timeout=10m0s -test.v=true", ""},
		{"x.test -test.testlogfile=/build/log -test.gocoverdir=/build/cover -test.coverprofile=c.out", "/build/log /build/cover /pkg/c.out"},
		{"x.test -test.run=TestA -record=testdata/results.txt", "/pkg/testdata/results.txt"},
		{"x.test -test.cpuprofile=cpu -test.memprofile=/m -test.trace=t -test.outputdir=../out", "/out /out/cpu /m /out/t"},
	} {
		got := strings.Join(outputs(strings.Fields(test.args), "/pkg"), " ")
		if got != test.want {
			t.Errorf("%s: %q, want %q", test.args, got, test.want)
		}
	}
	if got := testTimeout(strings.Fields("x.test -test.timeout=90s")); got != 90*time.Second {
		t.Errorf("timeout %s", got)
	}
}

func TestMerged(t *testing.T) {
	for name, want := range map[string]string{
		"./": ".", "./bin/sh": "usr/bin/sh", "./lib/modules/x": "usr/lib/modules/x", "./usr/lib/x": "usr/lib/x", "/etc/x": "etc/x",
		"./lib64": "usr/lib64", "library/x": "library/x",
	} {
		if got := merged(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// receive writes only requested files, even if the guest sends others.
func TestReceive(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(from, "a"), []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	sent := end{Code: 3, Release: "6.1", Boot: time.Second, Run: time.Minute}
	if err := send(&b, []string{from, filepath.Join(from, "not there")}, sent); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(from, "a")); err != nil {
		t.Fatal(err)
	}
	for _, wanted := range []string{from, filepath.Join(from, "a")} {
		e, err := receive(bytes.NewReader(b.Bytes()), []string{wanted})
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(sent, *e); d != "" {
			t.Errorf("end (-want +got):\n%s", d)
		}
		if text, err := os.ReadFile(filepath.Join(from, "a")); string(text) != "text" {
			t.Errorf("%q came back, %v", text, err)
		}
	}
	for _, wanted := range [][]string{nil, {to}, {from + "b"}, {filepath.Join(from, "b")}} {
		if _, err := receive(bytes.NewReader(b.Bytes()), wanted); err == nil {
			t.Errorf("accepted, although only %v were requested", wanted)
		}
	}
	// A guest that died has no end.
	if _, err := receive(bytes.NewReader(b.Bytes()[:1024]), []string{from}); err == nil {
		t.Error("got an end, want an error")
	}
}

func TestModuleTexts(t *testing.T) {
	modules := []module{
		{Name: "ip_vs", File: "kernel/net/ip_vs.ko", Deps: []string{"nf_conntrack", "libcrc32c"}},
		{Name: "nf_conntrack", File: "kernel/net/nf_conntrack.ko", Deps: []string{"nf_defrag", "libcrc32c", "built_in"}, Aliases: []string{"ct", "nf:*"}},
		{Name: "nf_defrag", File: "kernel/net/nf-defrag.ko"},
		{Name: "libcrc32c", File: "kernel/lib/libcrc32c.ko"},
	}
	want := `kernel/net/ip_vs.ko: kernel/net/nf_conntrack.ko kernel/lib/libcrc32c.ko kernel/net/nf-defrag.ko
kernel/net/nf_conntrack.ko: kernel/lib/libcrc32c.ko kernel/net/nf-defrag.ko
kernel/net/nf-defrag.ko: 
kernel/lib/libcrc32c.ko: 
`
	if d := cmp.Diff(want, dependencies(modules)); d != "" {
		t.Errorf("modules.dep (-want +got):\n%s", d)
	}
	if got := aliases(modules); got != "alias ct nf_conntrack\nalias nf:* nf_conntrack\n" {
		t.Errorf("modules.alias: %q", got)
	}
	for file, want := range map[string]string{"net/nf-defrag.ko.xz": "nf_defrag", "nf-defrag": "nf_defrag", "a/x.ko": "x"} {
		if got := moduleName(file); got != want {
			t.Errorf("%s: %s, want %s", file, got, want)
		}
	}
	for file, want := range map[string]bool{
		"net/sctp/sctp.ko": true, "drivers/net/veth.ko.xz": true, "drivers/net/ethernet/intel/x.ko": false, "net/bluetooth/x.ko": false, "sound/x.ko": false,
	} {
		if wantedModule(file) != want {
			t.Errorf("%s: wanted: %v", file, !want)
		}
	}
}
