// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// tree writes files below a new directory, by path.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// fakeHost has all its roots below one tree: proc, sys and modules.
func fakeHost(t *testing.T, files map[string]string) *host {
	t.Helper()
	root := tree(t, files)
	return newHost(Options{
		ProcRoot:    filepath.Join(root, "proc"),
		SysRoot:     filepath.Join(root, "sys"),
		ModulesRoot: filepath.Join(root, "modules"),
	})
}

func TestFindCgroup2Root(t *testing.T) {
	const (
		hybrid = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n" +
			"32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu\n" +
			"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:10 master:2 - cgroup2 cgroup2 rw\n"
		unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		partial = "50 23 0:26 /kubepods/pod1 /some/where rw - cgroup2 cgroup2 rw\n"
		blank   = `60 23 0:26 / /mnt/c\040group\134two rw - cgroup2 none rw` + "\n"
		v1      = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
		hiding  = "70 30 0:44 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
	)
	tests := []struct {
		name      string
		mountinfo string
		want      string
	}{
		{"unified", unified, "/sys/fs/cgroup"},
		{"hybrid", hybrid, "/sys/fs/cgroup/unified"},
		{"whole hierarchy wins over a part", partial + unified, "/sys/fs/cgroup"},
		{"a part is better than nothing", v1 + partial, "/some/where"},
		{"escaped path", blank, `/mnt/c group\two`},
		{"hidden by a later mount", unified + hiding, ""},
		{"version 1 only", v1, ""},
		{"nothing", "", ""},
		{"malformed lines are skipped", "garbage\n1 2 3 - cgroup2\n - \n" + unified, "/sys/fs/cgroup"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := FindCgroup2Root(tree(t, map[string]string{"self/mountinfo": tt.mountinfo}))
			if got != tt.want {
				t.Errorf("root = %q, want %q", got, tt.want)
			}
			if (tt.want == "") != errors.Is(err, ErrNoCgroup2) {
				t.Errorf("error = %v", err)
			}
			if err != nil && !(strings.Contains(err.Error(), "mount -t cgroup2") && strings.Contains(err.Error(), "--ebpf-cgroup-root")) {
				t.Errorf("error does not say what to do: %v", err)
			}
		})
	}
	if _, err := FindCgroup2Root(t.TempDir()); !errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrNoCgroup2) {
		t.Errorf("without mountinfo: %v", err)
	}
}

func FuzzParseMountinfo(f *testing.F) {
	f.Add("41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:10 - cgroup2 cgroup2 rw\n")
	f.Add(`60 23 0:26 / /mnt/c\040group\1 rw - cgroup2 none rw`)
	f.Fuzz(func(t *testing.T, text string) {
		mounts, err := parseMountinfo(strings.NewReader(text))
		if err == nil {
			_ = chooseCgroup2(mounts)
		}
	})
}

func TestCgroup2RootState(t *testing.T) {
	root := t.TempDir()
	h := newHost(Options{CgroupRoot: root})
	if got := probeCgroup2Root(context.Background(), h, ""); got.state != No || !strings.Contains(got.err.Error(), "not a cgroup2 filesystem") {
		t.Errorf("ordinary directory: %s, %v", got.state, got.err)
	}
	h = newHost(Options{CgroupRoot: filepath.Join(root, "absent")})
	if got := probeCgroup2Root(context.Background(), h, ""); got.state != No || !errors.Is(got.err, fs.ErrNotExist) {
		t.Errorf("absent directory: %s, %v", got.state, got.err)
	}
	h = fakeHost(t, map[string]string{"proc/self/mountinfo": ""})
	if got := probeCgroup2Root(context.Background(), h, ""); got.state != No || !errors.Is(got.err, ErrNoCgroup2) {
		t.Errorf("nothing mounted: %s, %v", got.state, got.err)
	}
	h = fakeHost(t, nil)
	if got := probeCgroup2Root(context.Background(), h, ""); got.state != Inconclusive {
		t.Errorf("no mountinfo: %s, %v", got.state, got.err)
	}
}

func TestHostFiles(t *testing.T) {
	const jit = "proc/sys/net/core/bpf_jit_enable"
	tests := []struct {
		name  string
		probe probeFunc
		files map[string]string
		want  State
		text  string // in the detail or the error
	}{
		{"jit on", probeJIT, map[string]string{jit: "1\n"}, Yes, "is 1"},
		{"jit with debugging", probeJIT, map[string]string{jit: "2\n"}, Yes, "is 2"},
		{"jit off", probeJIT, map[string]string{jit: "0\n"}, No, "is 0"},
		{"jit garbled", probeJIT, map[string]string{jit: "?\n"}, Inconclusive, "?"},

		{"btf there", probeBTF, map[string]string{"sys/kernel/btf/vmlinux": "x"}, Yes, "vmlinux"},
		{"btf absent", probeBTF, nil, No, "vmlinux"},
		{"kfunc without btf", probes[ConntrackLookup], nil, No, "kfuncs need kernel BTF"},
		{"kfunc with broken btf", probes[ConntrackLookup], map[string]string{"sys/kernel/btf/vmlinux": "x"}, Inconclusive, ""},

		{"conntrack", probeConntrack, map[string]string{"proc/sys/net/netfilter/nf_conntrack_max": "262144\n"}, Yes, "262144"},
		{"conntrack module on disk", probeConntrack, map[string]string{
			"proc/sys/kernel/osrelease": "6.1.0\n", "proc/modules": "",
			"modules/6.1.0/modules.builtin": "", "modules/6.1.0/modules.dep": "kernel/net/netfilter/nf_conntrack.ko: kernel/lib/libcrc32c.ko\n",
		}, Inconclusive, "modprobe nf_conntrack"},

		{"clsact built in", probeClsact, map[string]string{"proc/kallsyms": "0 t clsact_init\n0 t cls_bpf_classify.llvm.42\n"}, Yes, ""},
		{"clsact half there", probeClsact, map[string]string{"proc/kallsyms": "0 t clsact_init\n"}, No, "cls_bpf"},
		{"clsact hidden", probeClsact, map[string]string{"proc/kallsyms": ""}, Inconclusive, "sch_ingress"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.probe(context.Background(), fakeHost(t, tt.files), "")
			if got.state != tt.want {
				t.Errorf("state = %s, want %s (%v)", got.state, tt.want, got.err)
			}
			if (got.state == Yes) != (got.err == nil) {
				t.Errorf("state %s with error %v", got.state, got.err)
			}
			if text := got.detail + errorText(got.err); !strings.Contains(text, tt.text) {
				t.Errorf("%q does not mention %q", text, tt.text)
			}
		})
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestModule(t *testing.T) {
	const release = "6.1.0-test"
	osrelease := map[string]string{"proc/sys/kernel/osrelease": release + "\n"}
	with := func(more map[string]string) map[string]string {
		files := map[string]string{}
		for _, m := range []map[string]string{osrelease, more} {
			for name, content := range m {
				files[name] = content
			}
		}
		return files
	}
	const dir = "modules/" + release + "/"
	tests := []struct {
		name   string
		files  map[string]string
		symbol string
		want   modulePresence
	}{
		{"symbol", with(map[string]string{"proc/kallsyms": "ffffffff81 t ip_set_create\t[ip_set]\n"}), "ip_set_create", moduleLoaded},
		{"loaded", with(map[string]string{"proc/modules": "ip_set 61440 0 - Live 0x0\n"}), "", moduleLoaded},
		{"built in", with(map[string]string{"proc/modules": "", dir + "modules.builtin": "kernel/net/netfilter/ipset/ip_set.ko\n"}), "", moduleLoaded},
		{"on disk", with(map[string]string{"proc/modules": "", dir + "modules.builtin": "", dir + "modules.dep": "kernel/net/netfilter/ipset/ip_set.ko.xz:\n"}), "", moduleAvailable},
		{"on disk, with a dash", with(map[string]string{"proc/modules": "", dir + "modules.builtin": "", dir + "modules.dep": "extra/ip-set.ko.zst: a.ko.zst\n"}), "", moduleAvailable},
		{"only as a dependency", with(map[string]string{"proc/modules": "", dir + "modules.builtin": "", dir + "modules.dep": "extra/a.ko: extra/ip_set.ko\n"}), "", moduleAbsent},
		{"longer name", with(map[string]string{"proc/modules": "ip_set_hash_ip 1 0 - Live 0x0\n", dir + "modules.builtin": "", dir + "modules.dep": ""}), "", moduleAbsent},
		{"no module support", with(map[string]string{"proc/kallsyms": "0 T other\n"}), "ip_set_create", moduleAbsent},
		{"no module support, symbol not watched", with(map[string]string{"proc/kallsyms": "0 T other\n"}), "unwatched", moduleUnknown},
		{"nothing mounted", with(map[string]string{"proc/modules": ""}), "ip_set_create", moduleUnknown},
		{"built-in list missing", with(map[string]string{"proc/modules": "", dir + "modules.dep": ""}), "", moduleUnknown},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, reason := fakeHost(t, tt.files).module("ip_set", tt.symbol)
			if got != tt.want {
				t.Errorf("presence = %d, want %d (%v)", got, tt.want, reason)
			}
			if (got == moduleLoaded) != (reason == nil) {
				t.Errorf("presence %d with reason %v", got, reason)
			}
		})
	}
}

func TestIPVSSchedulersListed(t *testing.T) {
	h := fakeHost(t, map[string]string{
		"proc/sys/kernel/osrelease":   "6.1.0\n",
		"proc/modules":                "ip_vs_rr 16384 1 - Live 0x0\nip_vs 200704 3 ip_vs_rr, Live 0x0\n",
		"modules/6.1.0/modules.dep":   "kernel/net/netfilter/ipvs/ip_vs_sh.ko.zst: kernel/net/netfilter/ipvs/ip_vs.ko.zst\n",
		"modules/6.1.0/modules.alias": "",
	})
	want := outcome{state: Yes, detail: "on this host: rr, sh"}
	if diff := cmp.Diff(want, probeIPVSSchedulers(context.Background(), h, ""), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("outcome (-want +got):\n%s", diff)
	}
}

// fakeTool is a script that prints a version.
func fakeTool(version string) string { return "#!/bin/sh\necho '" + version + "'\n" }

func TestIPTablesLegacyVariant(t *testing.T) {
	const kernelHasIt = "proc/net/ip_tables_names"
	tests := []struct {
		name   string
		tools  map[string]string
		kernel map[string]string
		want   State
		text   string
	}{
		{"named binary", map[string]string{"iptables-legacy": fakeTool("iptables v1.8.9 (legacy)")}, map[string]string{kernelHasIt: ""}, Yes, "v1.8.9 (legacy)"},
		{"plain binary", map[string]string{"iptables": fakeTool("iptables v1.8.9 (legacy)")}, map[string]string{kernelHasIt: ""}, Yes, "iptables, v1.8.9"},
		{"older than variants", map[string]string{"iptables": fakeTool("iptables v1.6.1")}, map[string]string{kernelHasIt: ""}, Yes, "v1.6.1"},
		{"plain binary of the other variant", map[string]string{"iptables": fakeTool("iptables v1.8.9 (nf_tables)")}, map[string]string{kernelHasIt: ""}, No, "not found"},
		{"no binary", nil, map[string]string{kernelHasIt: ""}, No, "iptables-legacy or iptables"},
		{"binary does not run", map[string]string{"iptables-legacy": "#!/bin/sh\nexit 3\n"}, map[string]string{kernelHasIt: ""}, Inconclusive, "exit status 3"},
		{"binary says nothing", map[string]string{"iptables-legacy": "#!/bin/sh\n"}, map[string]string{kernelHasIt: ""}, Inconclusive, "cannot read"},
		{"kernel lacks it", map[string]string{"iptables-legacy": fakeTool("iptables v1.8.9 (legacy)")}, map[string]string{"proc/kallsyms": "0 T other\n"}, No, "ip_tables"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bin := tree(t, tt.tools)
			for name := range tt.tools {
				if err := os.Chmod(filepath.Join(bin, name), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("PATH", bin)
			got := fakeHost(t, tt.kernel).iptablesVariant(context.Background(), variantLegacy)
			if got.state != tt.want {
				t.Errorf("state = %s, want %s (%v)", got.state, tt.want, got.err)
			}
			if text := got.detail + errorText(got.err); !strings.Contains(text, tt.text) {
				t.Errorf("%q does not mention %q", text, tt.text)
			}
		})
	}
}

func TestFromXDPFeatures(t *testing.T) {
	if got := fromXDPFeatures(0b0000111); got.state != Yes || got.detail != "driver offers basic, redirect, ndo-xmit" {
		t.Errorf("got %s, %q", got.state, got.detail)
	}
	if got := fromXDPFeatures(0); got.state != No {
		t.Errorf("got %s", got.state)
	}
}
