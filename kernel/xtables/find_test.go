// SPDX-License-Identifier: Apache-2.0

//go:build linux

package xtables

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/test/lab"
)

func TestFind(t *testing.T) {
	const (
		hint    = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n"
		canary  = "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n"
		foreign = "*filter\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\nCOMMIT\n"
		more    = foreign + "*nat\n:CNI - [0:0]\n-A CNI -j MASQUERADE\n-A POSTROUTING -j CNI\nCOMMIT\n"
		proxy   = "*nat\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -j RETURN\n-A OUTPUT -j KUBE-SERVICES\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n"
	)
	for _, tc := range []struct {
		name        string
		nft, legacy string
		nft6, leg6  string
		plain       Variant
		want        Variant
	}{
		{name: "nothing, plain nft", plain: NFT, want: NFT},
		{name: "nothing, plain legacy", plain: Legacy, want: Legacy},
		{name: "hint in nft", nft: hint, legacy: more, plain: Legacy, want: NFT},
		{name: "hint in legacy", nft: more, legacy: hint, plain: NFT, want: Legacy},
		{name: "hints in both", nft: hint, legacy: hint, plain: Legacy, want: NFT},
		{name: "canary in nft", nft: canary, legacy: more, plain: Legacy, want: NFT},
		{name: "canary in legacy, IPv6", nft: more, leg6: canary, plain: NFT, want: Legacy},
		{name: "the name in another table", nft: strings.Replace(hint, "mangle", "nat", 1), legacy: foreign, plain: NFT, want: Legacy},
		{name: "rules in nft", nft: foreign, plain: Legacy, want: NFT},
		{name: "rules in legacy", legacy: foreign, plain: NFT, want: Legacy},
		{name: "more in nft", nft: more, legacy: foreign, plain: Legacy, want: NFT},
		{name: "more in legacy, IPv6", nft: foreign, leg6: more, plain: NFT, want: Legacy},
		{name: "as many", nft: foreign, legacy: foreign, plain: Legacy, want: Legacy},
		{name: "those of a proxy do not count", nft: proxy, nft6: proxy, legacy: foreign, plain: NFT, want: Legacy},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNode(t, NFT)
			both := [2]*Tools{NFT: n.tools, Legacy: n.open(Legacy)}
			for v, inputs := range [2][inet.Families]string{{tc.nft, tc.nft6}, {tc.legacy, tc.leg6}} {
				for f, input := range inputs {
					if input != "" {
						n.do(func() error { return both[v].Restore(bg, inet.Family(f), []byte(input)) })
					}
				}
			}
			// The programs of the system, except for the plain names.
			dirs := append([]string{plainPrograms(t, tc.plain)}, searchPath()...)
			n.do(func() error {
				got, err := find(bg, dirs)
				if err == nil && got.Variant() != tc.want {
					err = fmt.Errorf("got %s, want %s", got.Variant(), tc.want)
				}
				return err
			})
		})
	}
}

// plainPrograms makes a directory with programs whose names do not contain the variant.
func plainPrograms(t *testing.T, v Variant) string {
	dir := t.TempDir()
	for f := range inet.Families {
		for _, program := range []string{"", "-restore", "-save"} {
			path, err := lookUp(searchPath(), fmt.Sprintf("%s-%s%s", plain(f), v, program))
			if err != nil {
				lab.SkipOrFail(t, err)
			}
			if err := os.Symlink(path, filepath.Join(dir, plain(f)+program)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

// TestFindCreatesNothing: Find does not create legacy tables. The legacy programs create a table
// that they are asked about, and then every packet traverses it.
func TestFindCreatesNothing(t *testing.T) {
	n := &node{tb: t, at: lab.NewT(t).Node("node1")}
	n.do(func() error {
		if _, err := Find(bg); err != nil {
			return err
		}
		for _, names := range []string{"ip_tables_names", "ip6_tables_names"} {
			text, err := os.ReadFile("/proc/thread-self/net/" + names)
			if err != nil || len(text) > 0 {
				return fmt.Errorf("%s: got %q, %v, want no tables", names, text, err)
			}
		}
		return nil
	})
}

func TestPlainPrograms(t *testing.T) {
	n := &node{tb: t, at: lab.NewT(t).Node("node1")}
	for _, v := range variants {
		dirs := []string{plainPrograms(t, v)}
		tools, err := newTools(v, dirs, 1)
		if err != nil || tools.Variant() != v || !tools.RandomFully() {
			t.Errorf("%s: got %v, %v", v, tools, err)
		}
		_, err = newTools(1-v, dirs, 1)
		if err == nil || !strings.Contains(err.Error(), "/iptables is of the "+v.String()+" variant") {
			t.Errorf("the variant other than %s: got %v", v, err)
		}
		n.do(func() error {
			found, err := find(bg, dirs)
			if err == nil && found.Variant() != v {
				err = fmt.Errorf("find: got %s, want %s", found.Variant(), v)
			}
			return err
		})
	}
}

func TestMissingPrograms(t *testing.T) {
	for _, tc := range []struct {
		name    string
		version string // of iptables-nft, -save and -restore; empty: none exist
		without string // the program that is missing
		want    string
	}{
		{"none", "", "", "install package iptables: no programs for IPv4 in the nft variant: no iptables-nft; no iptables\n"},
		{"no restore", "v1.8.9 (nf_tables)", "iptables-nft-restore", "no iptables-nft-restore"},
		{"no save", "v1.8.9 (nf_tables)", "iptables-nft-save", "no iptables-nft-save"},
		{"old", "v1.6.1 (nf_tables)", "", "iptables-nft is version 1.6.1: install 1.6.2 or later"},
		{"no version", "x (nf_tables)", "", "no iptables version found"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			if tc.version != "" {
				dir = scripts(t, tc.version, "exit 1")
			}
			if tc.without != "" {
				if err := os.Remove(filepath.Join(dir, tc.without)); err != nil {
					t.Fatal(err)
				}
			}
			for name, fn := range map[string]func() (*Tools, error){
				"new":  func() (*Tools, error) { return newTools(NFT, []string{dir}, 1) },
				"find": func() (*Tools, error) { return find(bg, []string{dir}) },
			} {
				if _, err := fn(); err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("%s: got %v, want %q", name, err, tc.want)
				}
			}
		})
	}
}

// scripts makes a directory with programs of the nft variant that print a version. The one for
// restore runs the given script.
func scripts(t *testing.T, version, restore string) string {
	dir := t.TempDir()
	for program, script := range map[string]string{
		"iptables-nft": "echo 'iptables " + version + "'", "iptables-nft-save": "exit 1", "iptables-nft-restore": restore,
	} {
		if err := os.WriteFile(filepath.Join(dir, program), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestOneFamilyMissing(t *testing.T) {
	dir := plainPrograms(t, NFT)
	if err := os.Remove(filepath.Join(dir, "ip6tables-save")); err != nil {
		t.Fatal(err)
	}
	tools, err := newTools(NFT, []string{dir}, 1)
	if err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func() error{
		"usable":  func() error { return tools.Usable(bg, inet.IPv6) },
		"restore": func() error { return tools.Restore(bg, inet.IPv6, []byte(harmless)) },
		"save":    func() error { _, err := tools.Save(bg, inet.IPv6, "nat"); return err },
	} {
		if err := call(); err == nil || !strings.Contains(err.Error(), "no programs for IPv6 in the nft variant") {
			t.Errorf("%s: got %v", name, err)
		}
	}
	n := &node{tb: t, at: lab.NewT(t).Node("node1")}
	n.do(func() error { return tools.Usable(bg, inet.IPv4) })
}

// TestFindCancelled: with a cancelled context, Find returns an error.
func TestFindCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(bg)
	cancel()
	if tools, err := Find(ctx); tools != nil || err == nil {
		t.Errorf("found %v, error %v", tools, err)
	}
}
