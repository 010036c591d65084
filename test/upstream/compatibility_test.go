// SPDX-License-Identifier: Apache-2.0

//go:build linux

package upstream

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/tandem-proxy/tandem/test/differential"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/scenarios"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// recorder records the failures of a scenario.
type recorder struct {
	testing.TB
	mu     sync.Mutex
	errors []string
}

func (r *recorder) Helper() {}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

func (r *recorder) Skipf(string, ...any) {}

// difference is a call that upstream handles differently.
type difference struct{ scenario, call, theirs, ours string }

var (
	failedCall = regexp.MustCompile(`^(\S+)\.txtar:(\d+): .*; observed: (.*)$`)
	failedSync = regexp.MustCompile(`^(\S+)\.txtar:(\d+): ` + NoSync)
	count      = regexp.MustCompile(` \(\d+\)`)
)

// differenceOf parses the failure message of a call.
func differenceOf(s *scenarios.Scenario, text string) (d difference, err error) {
	said := failedCall.FindStringSubmatch(text)
	m := said
	if m == nil {
		m = failedSync.FindStringSubmatch(text)
	}
	if m == nil {
		return d, errors.New(text)
	}
	file, err := os.ReadFile("../scenarios/" + m[1] + ".txtar")
	if err != nil {
		return d, err
	}
	line, _ := strconv.Atoi(m[2])
	command := strings.Split(string(file), "\n")[line-1]
	if said == nil {
		return difference{s.Name, command, "nothing is programmed from here on", "programmed"}, nil
	}
	call, expected, _ := strings.Cut(command, " : ")
	theirs := strings.NewReplacer("timed out", "no answer", "not permitted", "not permitted at once").Replace(count.ReplaceAllString(said[3], ""))
	return difference{s.Name, strings.TrimPrefix(call, "reach "), theirs, expected}, nil
}

// reasons are why upstream answers otherwise: expressions for a scenario, and for a call
// with what is said of it. With chance, what upstream does is that, and not every time:
// the calls of the scenario are not told apart then.
var reasons = []struct{ scenario, call, chance, reason string }{
	{scenario: "c43-localhost", reason: "upstream needs `localhostNodePorts` besides the word `localhost` of `nodePortAddresses`, and never serves `::1`"},
	{scenario: "c43-localhost-node-ports", call: "::1", reason: "neither upstream's rules nor Tandem's serve NodePorts at `::1`: IPv6 has no `route_localnet`; Tandem's programs do"},
	{scenario: "c43-localhost-node-ports", call: "127.0.0.2", reason: "upstream serves the selected loopback addresses that a device has; all of 127.0.0.0/8 is this host's"},
	{scenario: "c53-who-has-a-health-check|s01-hostile-service|s20-address-types", call: "nothing is programmed", reason: "no API server accepts this object; because of it `iptables-restore` refuses the rules of all Services"},
	{scenario: "s0[35]-conflict.*|s05-external-ip-cannot-steal|s06-load-balancer-ip-cannot-steal|s08-conflict-node-port|s09-ports-twice|s88-restart",
		chance: "whose rule comes first has it", reason: "[two claims on one address](semantics.md#two-claims-on-one-address) are decided by kind, then age, then name"},
	{scenario: "s05-invalid-addresses", call: "127.0.0.1", reason: "upstream serves loopback addresses as external IPs, so the host loses them"},
	{scenario: "s05-invalid-addresses", call: "203.0.113.9", reason: "upstream reads the IPv4-mapped IPv6 address as the IPv4 address"},
	{scenario: "s06-one-address-twice", reason: "in upstream an external IP precedes the same load balancer IP and bypasses its source ranges"},
	{scenario: "s10-ports-without-number", reason: "an API server sets a missing port name to `\"\"`"},
	{scenario: "s20-slice-changes-service", reason: "upstream ignores that a slice changes its Service; controllers do not do that"},
	{scenario: "s22-copies-alike", chance: "any of the copies counts", reason: "the copy in the first slice by name counts"},
	{scenario: "s22-ready-copy", chance: "any of the copies counts", reason: "the ready copy counts"},
	{scenario: "s27-node-without-zone", reason: "upstream treats no zone as a zone with an empty name; no API server accepts such a hint"},
	{scenario: "s41-no-endpoints", call: "host .* no answer", reason: "upstream has no rule for this host that refuses external IPs"},
	{scenario: "s41-no-endpoints-udp", reason: "for datagrams that rules reject the kernel returns `EPERM` to this host, with Tandem's rules too; programs refuse at the socket"},
	{scenario: "s45-pods-of-other-nodes", chance: "sometimes no answer", reason: "upstream takes pods of other nodes for its own; replies of endpoints on other nodes pass the node by"},
	{scenario: "s48-ranges-before-endpoints", reason: "upstream does not check source ranges where there is no endpoint"},
	{scenario: "s48-ranges-invalid", reason: "upstream ignores invalid ranges, and admits every client if no other range is left"},
	{scenario: "s48-ranges-of-the-other-family", reason: "`strictSourceRanges` is Tandem's; without it the answer is the same"},
	{scenario: "s71-udp-no-endpoints", call: "flow outer", reason: "upstream keeps conntrack entries of a NodePort that has no endpoints or is deleted"},
	{scenario: "s71-udp-no-endpoints", call: "flow inner", reason: "upstream keeps conntrack entries of a deleted Service"},
	{scenario: "s22-duplicates-and-hints|s2[789]-.*|s30-.*|s71-udp-serving-but-not-chosen",
		chance: "sometimes as on a node without a zone", reason: "upstream may miss the Node when it starts, since events can arrive before its handler is registered; it learns the zone when that changes"},
	{scenario: "s92-maintenance", reason: "weights are Tandem's"},
	{scenario: "s95-type", reason: "the annotation `type` is Tandem's"},
	{scenario: "s96-denied-ranges", reason: "the annotation `src-ranges-policy` is Tandem's"},
	{scenario: "s100-rejected-ranges", reason: "the annotation `src-ranges-action` is Tandem's"},
	{scenario: "s97-nodes", reason: "the annotations `node-selector` and `node` are Tandem's"},
	{scenario: ".*", call: "(-> (10.9[67]|\\[fd00:10:96).*|unreachable) : refused$", reason: "[unallocated ClusterIPs](semantics.md#unallocated-clusterips) are rejected; upstream lets the packets go where routes lead"},
}

// scenarioOf is the name of the scenario in a row.
func scenarioOf(row string) string {
	_, rest, _ := strings.Cut(row, "`")
	name, _, _ := strings.Cut(rest, "`")
	return name
}

// byChance stands for the calls of a scenario that upstream answers otherwise now and then.
const byChance = "some, by chance"

// row is a line of the table, and whether it has to be there.
func (d *difference) row() (text string, always bool) {
	call, theirs, ours := "`"+d.call+"`", d.theirs, d.ours
	for _, r := range reasons {
		if !regexp.MustCompile("^("+r.scenario+")$").MatchString(d.scenario) ||
			!regexp.MustCompile(r.call).MatchString(d.call+" : "+d.theirs+" : "+d.ours) {
			continue
		}
		if r.chance != "" {
			call, theirs, ours = byChance, r.chance, "as the scenario says"
		}
		return fmt.Sprintf("| `%s` | %s | %s | %s | %s |\n", d.scenario, call, theirs, ours, r.reason), r.chance == ""
	}
	return "", true
}

// The page is written by hand up to the heading of the calls.
const (
	compatibilityFile = "../../docs/compatibility.md"
	callsHead         = `## Calls with another result

The scenarios of ` + "`test/scenarios`" + ` define what Services mean here ([semantics.md](semantics.md)).
The same scenarios were played with upstream's kube-proxy %s in mode iptables, on the same real
traffic. The table has every call with another result. Calls by SCTP were not made. If an event has
another result, the rest of its scenario was left out. Objects had the defaults of an API server,
which would reject some of them.

Where [both run on one node](processes.md#another-kube-proxy-on-the-node), each answers its own part in
this way (` + "`TestCoexistence`" + `).

` + "`go test ./test/upstream -run TestCompatibility -update`" + ` writes this table, where
` + "`UPSTREAM_KUBE_PROXY`" + ` is set ([testing.md](testing.md#beside-upstreams-kube-proxy)).

| Scenario | Call | Upstream | Tandem | Why |
|---|---|---|---|---|
`
)

// playedWith finds the release in the page.
var playedWith = regexp.MustCompile(`upstream's kube-proxy (v\S+) in mode`)

var update = flag.Bool("update", false, "write docs/compatibility.md")

// TestCompatibility plays the scenarios with upstream's kube-proxy. The calls that it
// answers otherwise are those in docs/compatibility.md.
func TestCompatibility(t *testing.T) {
	binary := BinaryT(t)
	list, err := scenarios.WithoutPods()
	if err != nil {
		t.Fatal(err)
	}
	version, err := exec.Command(binary, "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(compatibilityFile)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	found := map[string]bool{} // rows, and whether they have to be there
	play := func(t *testing.T, s *scenarios.Scenario) {
		rows := differences(t, s, binary)
		for row, always := range rows {
			if always && !*update && !strings.Contains(string(page), row) {
				t.Logf("again, since a busy machine loses packets: %s", row)
				rows = differences(t, s, binary)
				break
			}
		}
		mu.Lock()
		defer mu.Unlock()
		maps.Copy(found, rows)
	}
	next := make(chan *scenarios.Scenario)
	var wg sync.WaitGroup
	for range Players() {
		wg.Go(func() {
			for s := range next {
				t.Run(s.Name, func(t *testing.T) { play(t, s) })
			}
		})
	}
	played := map[string]bool{}
	for i, s := range list {
		if kernel.Dealt(i) {
			played[s.Name] = true
			next <- s
		}
	}
	close(next)
	wg.Wait()
	if t.Failed() {
		return
	}
	release := strings.TrimPrefix(strings.TrimSpace(string(version)), "Kubernetes ")
	heading, _, _ := strings.Cut(callsHead, "\n")
	before, text, ok := strings.Cut(string(page), heading)
	if text = heading + text; !ok {
		t.Fatalf("%s has no heading %q", compatibilityFile, heading)
	}
	if *update {
		if len(played) < len(list) {
			t.Fatalf("only %d of %d scenarios were played: unset TANDEM_PART", len(played), len(list))
		}
		for row := range strings.Lines(text) {
			if strings.Contains(row, byChance) {
				found[row] = false
			}
		}
		text = fmt.Sprintf(callsHead, release) + strings.Join(slices.Sorted(maps.Keys(found)), "") + differential.Section()
		if err := os.WriteFile(compatibilityFile, []byte(before+text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// Another release that answers the same is no reason for another page.
	if said := playedWith.FindStringSubmatch(text); said != nil && said[1] != release {
		t.Logf("%s is of %s; this is %s", compatibilityFile, said[1], release)
		release = said[1]
	}
	head := fmt.Sprintf(callsHead, release)
	body, same := strings.CutPrefix(text, head)
	if !same {
		t.Errorf("%s has no\n%s", compatibilityFile, head)
	}
	body = strings.TrimSuffix(body, differential.Section()) // which a test there compares
	for row := range strings.Lines(body) {
		if _, there := found[row]; !there && played[scenarioOf(row)] && !strings.Contains(row, byChance) {
			t.Errorf("upstream does not differ any more:\n%s", row)
		}
		delete(found, row)
	}
	for row, always := range found {
		if always {
			t.Errorf("not in %s:\n%s", compatibilityFile, row)
		}
	}
	t.Logf("%d of %d scenarios", len(played), len(list))
}

// differences plays a scenario, and returns the rows of the table, and whether they have to be there.
func differences(t *testing.T, s *scenarios.Scenario, binary string) map[string]bool {
	r := &recorder{TB: t}
	live.PlayProgram(r, s, Program{Binary: binary, Mode: "iptables"})
	rows := map[string]bool{}
	for _, text := range r.errors {
		d, err := differenceOf(s, text)
		if err != nil {
			t.Error(err)
			continue
		}
		row, always := d.row()
		if row == "" {
			t.Errorf("no reason is listed for: %s", text)
		}
		rows[row] = always
	}
	return rows
}
