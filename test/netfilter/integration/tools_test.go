// SPDX-License-Identifier: Apache-2.0

//go:build linux

package integration

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
)

var update = flag.Bool("update", false, "write to testdata what the real tools print")

// tools are the real ones of a variant and family, in a namespace.
type tools struct {
	name string
	*lab.Sandbox
}

func newTools(t *testing.T, f proxier.Family, variant string, s *lab.Sandbox) tools {
	t.Helper()
	name := map[proxier.Family]string{proxier.IPv4: "iptables-", proxier.IPv6: "ip6tables-"}[f] + variant
	for _, tool := range []string{name + "-restore", name + "-save"} {
		if _, err := exec.LookPath(tool); err != nil {
			lab.SkipOrFail(t, err)
		}
	}
	return tools{name, s}
}

func (r tools) restore(input string) (output string, err error) {
	c := r.Command(context.Background(), r.name+"-restore", "--noflush")
	c.Stdin = strings.NewReader(input)
	text, err := c.CombinedOutput()
	return string(text), err
}

// notRules are comments, and counters.
var notRules = regexp.MustCompile(`(?m)^#.*\n| \[\d+:\d+\]$`)

func (r tools) save(t *testing.T) string {
	t.Helper()
	var text strings.Builder
	for _, table := range tableNames {
		part, err := r.Command(context.Background(), r.name+"-save", "-t", table).Output()
		if err != nil {
			t.Fatalf("%s-save -t %s: %v", r.name, table, err)
		}
		text.WriteString(notRules.ReplaceAllStringFunc(string(part), func(s string) string {
			if strings.HasPrefix(s, "#") {
				return ""
			}
			return " [0:0]"
		}))
	}
	return text.String()
}

// TestTools: both variants of the real tools print the golden files.
func TestTools(t *testing.T) {
	for name, f := range families {
		for _, variant := range []string{"nft", "legacy"} {
			t.Run(name+"/"+variant, func(t *testing.T) {
				r := newTools(t, f, variant, lab.NewT(t).Client("client").Sandbox)
				if err := r.Do(func() error { return nfacct.Kernel{}.Ensure("test_pkts") }); err != nil {
					t.Fatal(err)
				}
				if output, err := r.restore(read(t, name+".rules")); err != nil {
					t.Fatalf("%v: %s", err, output)
				}
				saved := r.save(t)
				if *update && variant == "nft" {
					if err := os.WriteFile("../testdata/"+name+".saved", []byte(saved), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				if diff := cmp.Diff(read(t, name+".saved"), saved); diff != "" {
					t.Errorf("saved (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// TestToolsRefuse: the tools reject what the fake rejects, except for the lines in
// stricter.txt.
func TestToolsRefuse(t *testing.T) {
	if err := lab.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	taken := map[string]bool{}
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			r := newTools(t, proxier.IPv4, variant, lab.NewT(t).Client("client").Sandbox)
			if output, err := r.restore(read(t, "base.rules")); err != nil {
				t.Fatalf("%v: %s", err, output)
			}
			before := r.save(t)
			for _, line := range lines(t, "refused.txt") {
				if _, err := r.restore(refusal(line)); err == nil {
					t.Errorf("%s is accepted", line)
				}
			}
			if diff := cmp.Diff(before, r.save(t)); diff != "" {
				t.Errorf("something has changed (-before +after):\n%s", diff)
			}
			for _, line := range lines(t, "stricter.txt") {
				if _, err := r.restore(refusal(line)); err == nil {
					taken[line] = true
				}
				if output, err := r.restore("*nat\n:OUTPUT ACCEPT [0:0]\n-F\nCOMMIT\n" + read(t, "base.rules")); err != nil {
					t.Fatalf("%v: %s", err, output)
				}
			}
		})
	}
	for _, line := range lines(t, "stricter.txt") {
		if !taken[line] {
			t.Errorf("%s is rejected by both", line)
		}
	}
}
