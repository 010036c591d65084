// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

var updatePrograms = flag.Bool("update", false, "rewrite what testdata knows of the programs' sizes on this kernel")

// growth is the tolerated growth of a program, in percent.
const growth = 10

// programSize is the size of a program: for the verifier, and in the processor's instruction
// cache.
type programSize struct {
	name            string
	verified, jited uint32
}

func (s programSize) String() string {
	return fmt.Sprintf("%-24s %8d instructions verified %8d bytes", s.name, s.verified, s.jited)
}

// TestProgramSizes compares the size of every program with the recorded one for this kernel
// version and architecture. After a program became smaller, or grew intentionally, record the new
// size with -update.
func TestProgramSizes(t *testing.T) {
	p := newPath(t, Options{Sizes: lbmap.DefaultSizes(), Signals: true})
	var sizes []programSize
	measure := func(name string, program *ciliumebpf.Program) {
		info, err := program.Info()
		if err != nil {
			t.Fatal(err)
		}
		s := programSize{name: name}
		s.verified, _ = info.VerifiedInstructions()
		if s.jited, err = info.JitedSize(); err != nil {
			t.Fatal(err)
		}
		sizes = append(sizes, s)
	}
	for i, h := range datapath.Hooks {
		measure(h.Program, p.tier.hooks.Programs[i])
	}
	for _, v := range []struct {
		name string
		datapath.Variant
	}{
		{"uplink", datapath.Variant{Role: lbmap.RoleUplink}}, {"uplink/l3", datapath.Variant{Role: lbmap.RoleUplink, L3: true}},
		{"pod", datapath.Variant{Role: lbmap.RolePod}}, {"pod/l3", datapath.Variant{Role: lbmap.RolePod, L3: true}},
	} {
		programs, err := p.tier.devices.Programs(t.Context(), v.Variant)
		if err != nil {
			t.Fatal(err)
		}
		for i, h := range datapath.PacketHooks {
			measure(h.Program+" "+v.name, programs[i])
		}
	}
	xdp, err := p.tier.devices.XDP(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	measure("tdm_xdp", xdp)

	file := filepath.Join("testdata", "programs-"+kernelVersion(t)+"-"+runtime.GOARCH+".txt")
	if *updatePrograms {
		var b strings.Builder
		for _, s := range sizes {
			fmt.Fprintln(&b, s)
		}
		if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(file, []byte(b.String()), 0o644)); err != nil {
			t.Fatal(err)
		}
		return
	}
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		for _, s := range sizes {
			t.Log(s)
		}
		t.Skipf("missing: %s, the sizes on this kernel and architecture; -update records them", file)
	}
	if err != nil {
		t.Fatal(err)
	}
	recorded := parseSizes(string(text))
	for _, s := range sizes {
		at := slices.IndexFunc(recorded, func(r programSize) bool { return r.name == s.name })
		if at < 0 {
			t.Errorf("%s is not recorded in %s", s.name, file)
			continue
		}
		r := recorded[at]
		recorded = slices.Delete(recorded, at, at+1)
		if grown(s.verified, r.verified) || grown(s.jited, r.jited) {
			t.Errorf("more than %d %% larger:\nis  %v\nwas %v", growth, s, r)
		}
	}
	for _, r := range recorded {
		t.Errorf("%s records %s, which does not exist", file, r.name)
	}
}

func grown(is, was uint32) bool { return uint64(is)*100 > uint64(was)*(100+growth) }

func parseSizes(text string) (sizes []programSize) {
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		numbers := slices.Index(words, "instructions") - 1
		if numbers < 1 {
			continue
		}
		s := programSize{name: strings.Join(words[:numbers], " ")}
		if _, err := fmt.Sscanf(strings.Join(words[numbers:], " "), "%d instructions verified %d bytes", &s.verified, &s.jited); err == nil {
			sizes = append(sizes, s)
		}
	}
	return sizes
}

// kernelVersion returns major.minor. Within a minor version, the verifier does not change.
func kernelVersion(t *testing.T) string {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	major, minor := 0, 0
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor); err != nil {
		t.Fatalf("kernel release %s: %v", u.Release, err)
	}
	return fmt.Sprintf("%d.%d", major, minor)
}
