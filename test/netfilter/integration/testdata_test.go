// SPDX-License-Identifier: Apache-2.0

//go:build linux

package integration

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// families are those of the files in testdata.
var families = map[string]proxier.Family{"ipv4": proxier.IPv4, "ipv6": proxier.IPv6}

// tableNames are in the order iptables-save has.
var tableNames = []string{"filter", "mangle", "nat"}

// read reads a file in the testdata of package netfilter, whose tests say what it has.
func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func lines(t *testing.T, name string) []string {
	t.Helper()
	return strings.Split(strings.TrimSuffix(read(t, name), "\n"), "\n")
}

// refusal is input whose third line is refused, between others that could be restored.
func refusal(line string) string {
	table := "nat"
	if rest, ok := strings.CutPrefix(line, "filter "); ok {
		table, line = "filter", rest
	}
	return fmt.Sprintf("*%s\n:KUBE-X - [0:0]\n%s\n-A KUBE-X -p tcp\nCOMMIT\n", table, line)
}
