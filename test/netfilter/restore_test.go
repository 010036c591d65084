// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/proxier"
)

// families are those of the files in testdata.
var families = map[string]proxier.Family{"ipv4": proxier.IPv4, "ipv6": proxier.IPv6}

// tableNames are in the order iptables-save has.
var tableNames = []string{"filter", "mangle", "nat"}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func saveAll(t *Tables) string {
	var text strings.Builder
	for _, name := range tableNames {
		text.WriteString(t.Save(name))
	}
	return text.String()
}

// named are the counters that rules in testdata name, theirs and upstream's.
var named = []string{"test_pkts", "ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"}

// restored are tables with rules.
func restored(t *testing.T, f proxier.Family, rules string) *Tables {
	t.Helper()
	tables := New(f)
	counters := NewCounters(tables)
	for _, name := range named {
		if err := counters.Ensure(name); err != nil {
			t.Fatal(err)
		}
	}
	if err := tables.Restore([]byte(rules)); err != nil {
		t.Fatal(err)
	}
	return tables
}

// TestSave: every kind of rule is printed as the tools print it, who wrote the golden files
// (TestTools).
func TestSave(t *testing.T) {
	for name, f := range families {
		t.Run(name, func(t *testing.T) {
			tables := restored(t, f, read(t, name+".rules"))
			saved := saveAll(tables)
			if diff := cmp.Diff(read(t, name+".saved"), saved); diff != "" {
				t.Errorf("saved (-want +got):\n%s", diff)
			}
			again := restored(t, f, saved)
			if diff := cmp.Diff(saved, saveAll(again)); diff != "" {
				t.Errorf("what was saved is saved otherwise when it is restored (-first +second):\n%s", diff)
			}
		})
	}
	if saved := New(proxier.IPv4).Save("raw"); saved != "" {
		t.Errorf("unknown table saved as %q", saved)
	}
}

// base is what refused input meets.
const base = `*nat
:KUBE-A - [0:0]
:KUBE-B - [0:0]
:KUBE-C - [0:0]
:KUBE-D - [0:0]
-A KUBE-A -j KUBE-B
-A KUBE-A -p udp -j KUBE-D
-A KUBE-B -p tcp -j DNAT --to-destination 10.0.0.1:80
-A KUBE-C -j MASQUERADE
-A PREROUTING -j KUBE-A
COMMIT
*filter
:KUBE-R - [0:0]
-A KUBE-R -j REJECT
COMMIT
`

// refused by the tools as well, each in the line that has it: "filter" before a line
// puts it there instead of nat.
var refused = []string{
	"-A KUBE-A -j KUBE-NONE", "-A KUBE-A -j INPUT", "-A KUBE-NONE -j ACCEPT", "-I KUBE-NONE -j ACCEPT", "-D KUBE-NONE -j ACCEPT",
	"-F KUBE-NONE", "-X KUBE-NONE", "-X KUBE-B", "-X KUBE-C", "-X KUBE-D", "-X PREROUTING", "-X KUBE-A KUBE-B",
	"-D KUBE-A -j KUBE-C", "-D KUBE-A 3", "-I KUBE-A 0 -j KUBE-B", "-I KUBE-A 4 -j KUBE-B",
	":KUBE-SERVICES-456789012345678 - [0:0]",
	":PREROUTING REJECT [0:0]", ":PREROUTING",
	"-Q KUBE-A -j ACCEPT", "-A", "A KUBE-A",
	"-A KUBE-B -j KUBE-A", "-A PREROUTING -j KUBE-C", "-A KUBE-B -j KUBE-C", "-A POSTROUTING -j KUBE-A", "-A INPUT -j KUBE-B",
	"-A OUTPUT -i eth0 -j ACCEPT", "-A POSTROUTING -i eth0 -j ACCEPT", "-A PREROUTING -o eth0 -j ACCEPT", "-A INPUT -o eth0 -j ACCEPT",
	"-A KUBE-A -j DROP", "-A KUBE-A -j REJECT",
	"filter -A KUBE-R -j MASQUERADE", "filter -A KUBE-R -j DNAT --to-destination 10.0.0.1", "filter -A KUBE-R -j REDIRECT",
	"-A KUBE-A stray", "-A KUBE-A --stray", "-A KUBE-A -m stray", "-A KUBE-A -j KUBE-B --stray", "-A KUBE-A -j ACCEPT stray",
	"-A KUBE-A -j KUBE-B -j KUBE-C", "-A KUBE-A -s 10.0.0.1 -s 10.0.0.2", "-A KUBE-A -j", "-A KUBE-A -s", "-A KUBE-A !",
	"-A KUBE-A ! -m tcp", "-A KUBE-A ! -j KUBE-B",
	"-A KUBE-A -s fd00::1", "-A KUBE-A -s 10.0.0.0/33", "-A KUBE-A -s 10.0.0.0/-1", "-A KUBE-A -s 10.0.0.0/fd00::",
	"-A KUBE-A -i abcdefghijklmnop", "-A KUBE-A -p stray", "-A KUBE-A ! -p all",
	"-A KUBE-A -m comment", "-A KUBE-A -m comment --comment", "-A KUBE-A -m comment ! --comment x", "-A KUBE-A -m comment --comment 1 --comment 2",
	"-A KUBE-A -m tcp --dport 5", "-A KUBE-A -p tcp -m udp --dport 5", "-A KUBE-A --dport 5",
	"-A KUBE-A -p tcp --dport 65536", "-A KUBE-A -p tcp --dport x", "-A KUBE-A -p tcp --dport", "-A KUBE-A -p tcp --dport 5 --dport 6",
	"-A KUBE-A -p udp -m icmp --icmp-type 8", "-A KUBE-A -p icmp -m icmp --icmp-type 256", "-A KUBE-A -p icmp -m icmp --icmp-type 8/x",
	"-A KUBE-A -m mark", "-A KUBE-A -m mark --mark x", "-A KUBE-A -m mark --mark 0x100000000", "-A KUBE-A -m mark --mark 1/x",
	"-A KUBE-A -m conntrack", "-A KUBE-A -m conntrack --ctstate STRAY", "-A KUBE-A -m conntrack --ctstate NEW,,INVALID",
	"-A KUBE-A -m addrtype", "-A KUBE-A -m addrtype --dst-type STRAY",
	"-A KUBE-A -m statistic", "-A KUBE-A -m statistic --mode random", "-A KUBE-A -m statistic --probability 0.5",
	"-A KUBE-A -m statistic --mode random --probability 1.5", "-A KUBE-A -m statistic --mode random --probability -0.5",
	"-A KUBE-A -m recent", "-A KUBE-A -m recent --name x", "-A KUBE-A -m recent --set --rcheck", "-A KUBE-A -m recent --rcheck --update", "-A KUBE-A -m recent --rcheck --reap",
	"-A KUBE-A -m recent --rcheck --seconds 0", "-A KUBE-A -m recent --rcheck --mask x", "-A KUBE-A -m recent --rcheck --mask ffff::",
	"-A KUBE-A -m recent --set --seconds 10",
	"-A KUBE-A -m nfacct", "-A KUBE-A -m nfacct --nfacct-name a2345678901234567890123456789012", "-A KUBE-A -m nfacct --nfacct-name nobodys_pkts",
	"-A KUBE-A -j MARK", "-A KUBE-A -j MARK --set-xmark x", "-A KUBE-A -j MARK --set-xmark 1 --or-mark 1", "-A KUBE-A -j MARK ! --set-xmark 1",
	"-A KUBE-A -j DNAT", "-A KUBE-A -j DNAT --to-destination x", "-A KUBE-A -j DNAT --to-destination 10.0.0.1:80", "-A KUBE-A -j DNAT --to-destination fd00::1",
	"-A KUBE-A -p tcp -j DNAT --to-destination 10.0.0.1:65536",
	"-A KUBE-A -j REDIRECT --to-ports 80", "-A KUBE-A -p tcp -j REDIRECT --to-ports 65536", "-A KUBE-A -p tcp -j REDIRECT --to-ports x",
	"filter -A KUBE-R -j REJECT --reject-with stray", "filter -A KUBE-R -j REJECT --reject-with tcp-reset", "filter -A KUBE-R -j REJECT --reject-with icmp6-no-route",
}

// stricter is what at least one of the tools takes.
var stricter = []string{
	":KUBE-D ACCEPT [0:0]", ":OUTPUT DROP [0:0]", ":-KUBE - [0:0]", ":!KUBE - [0:0]",
	"-A KUBE-A ! -p tcp -m tcp --dport 5", "-A KUBE-A ! -p tcp -j DNAT --to-destination 10.0.0.1:80",
	"-A KUBE-A ! -s 0.0.0.0/0 -j KUBE-B", "-A KUBE-A ! -i +", "-A KUBE-A -p udp -m udp ! --dport 0:65535", "-A KUBE-A -p udp --dport 9:7",
	"-A KUBE-A -m comment --comment " + strings.Repeat("x", 256), `-A KUBE-A -m comment --comment "open`,
	"-A KUBE-C -j KUBE-C", "-F",
	"-A KUBE-A -m addrtype --limit-iface-in --dst-type LOCAL", "-A KUBE-A -m addrtype --dst-type UNICAST", "-A KUBE-A -g KUBE-B",
	"-A KUBE-A -m recent --set --rdest", "-A KUBE-A -p tcp --sport 5", "-A KUBE-A -p gre",
	"-A KUBE-C -j MASQUERADE --random", "-A KUBE-A -m conntrack --ctstate NEW,NEW",
	"-A KUBE-A -p tcp -j DNAT --to-destination 10.0.0.1-10.0.0.2:80", "-A KUBE-A -j MARK --and-mark 1",
}

// refusal is input whose third line is refused, followed and preceded by others that
// could be restored.
func refusal(line string) string {
	table := "nat"
	if rest, ok := strings.CutPrefix(line, "filter "); ok {
		table, line = "filter", rest
	}
	return fmt.Sprintf("*%s\n:KUBE-X - [0:0]\n%s\n-A KUBE-X -p tcp\nCOMMIT\n", table, line)
}

// TestRefuseKeeps: what came before the line at fault has not happened either.
func TestRefuseKeeps(t *testing.T) {
	for _, change := range []string{"-D KUBE-A 1", "-I KUBE-A -p udp", "-A KUBE-A -p udp", "-F KUBE-A", ":KUBE-A - [0:0]", ":POSTROUTING ACCEPT [0:0]\n-F KUBE-C\n-X KUBE-C"} {
		tables := restored(t, proxier.IPv4, base)
		before := saveAll(tables)
		if err := tables.Restore([]byte("*nat\n" + change + "\n-A KUBE-A -p tcp\n-A KUBE-A -j KUBE-NONE\nCOMMIT\n")); err == nil {
			t.Errorf("%s: no error", change)
		}
		if diff := cmp.Diff(before, saveAll(tables)); diff != "" {
			t.Errorf("%s has happened (-before +after):\n%s", change, diff)
		}
	}
}

// TestRefuse: an error names the line, and nothing has changed.
func TestRefuse(t *testing.T) {
	for _, line := range slices.Concat(refused, stricter) {
		tables := restored(t, proxier.IPv4, base)
		before := saveAll(tables)
		err := tables.Restore([]byte(refusal(line)))
		var at *Error
		if !errors.As(err, &at) || at.Line != 3 {
			t.Errorf("%s: error %v, want one in line 3", line, err)
		}
		if diff := cmp.Diff(before, saveAll(tables)); diff != "" {
			t.Errorf("%s has changed (-before +after):\n%s", line, diff)
		}
	}
}

// TestRefuseInput: input that is wrong as a whole.
func TestRefuseInput(t *testing.T) {
	deep := "*nat\n"
	for i := range maxDepth + 1 {
		deep += fmt.Sprintf(":KUBE-%d - [0:0]\n", i)
	}
	for i := range maxDepth {
		deep += fmt.Sprintf("-A KUBE-%d -j KUBE-%d\n", i, i+1)
	}
	for _, test := range []struct {
		name, input string
		line        int
	}{
		{"no table", "-A INPUT -j ACCEPT\n", 1},
		{"unknown table", "# comment\n*raw\nCOMMIT\n", 2},
		{"no COMMIT", "*nat\n:KUBE-A - [0:0]\n", 2},
		{"no COMMIT before the next table", "*nat\n:KUBE-A - [0:0]\n*filter\nCOMMIT\n", 3},
		{"too deep", deep + "-A PREROUTING -j KUBE-0\nCOMMIT\n", 3 + 2*maxDepth},
	} {
		tables := New(proxier.IPv4)
		err := tables.Restore([]byte(test.input))
		var at *Error
		if !errors.As(err, &at) || at.Line != test.line {
			t.Errorf("%s: error %v, want one in line %d", test.name, err, test.line)
		}
		if saved := saveAll(tables); saved != saveAll(New(proxier.IPv4)) {
			t.Errorf("%s: changed to\n%s", test.name, saved)
		}
	}
	if err := New(proxier.IPv4).Restore([]byte(deep + "-A PREROUTING -j KUBE-1\nCOMMIT\n")); err != nil {
		t.Error(err)
	}
}

// TestRestoreByTable: a table stays although the next one is refused.
func TestRestoreByTable(t *testing.T) {
	tables := New(proxier.IPv4)
	err := tables.Restore([]byte("*nat\n:KUBE-A - [0:0]\nCOMMIT\n*filter\n:KUBE-A - [0:0]\n-A KUBE-A -j KUBE-B\nCOMMIT\n"))
	if err == nil || !strings.HasPrefix(err.Error(), "restore line 6: ") {
		t.Errorf("error %v", err)
	}
	if saved := tables.Save("nat"); !strings.Contains(saved, ":KUBE-A - [0:0]\n") {
		t.Errorf("table nat is\n%s", saved)
	}
	if saved := tables.Save("filter"); strings.Contains(saved, "KUBE-A") {
		t.Errorf("table filter is\n%s", saved)
	}
}
