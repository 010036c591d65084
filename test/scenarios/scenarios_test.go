// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"flag"
	"os"
	"runtime/debug"
	"slices"
	"testing"

	"golang.org/x/tools/txtar"
)

var update = flag.Bool("update", false, "rewrite the expected texts of the scenarios")

func all(t testing.TB) []*Scenario {
	t.Helper()
	list, err := All()
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestModel(t *testing.T) {
	for _, s := range all(t) {
		t.Run(s.Name, func(t *testing.T) {
			defer func() { // a panic must not hide the results of other scenarios
				if p := recover(); p != nil {
					t.Errorf("%s.txtar: panic: %v\n%s", s.Name, p, debug.Stack())
				}
			}()
			if !*update {
				Run(t, s, NewModel(s))
				return
			}
			name := s.Name + ".txtar"
			a, err := txtar.ParseFile(name)
			if err != nil {
				t.Fatal(err)
			}
			run(t, s, NewModel(s), func(file, text string) {
				for i := range a.Files {
					if a.Files[i].Name == file {
						a.Files[i].Data = []byte(text)
					}
				}
			})
			if err := os.WriteFile(name, txtar.Format(a), 0o644); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// statements are the statements of docs/semantics.md.
var statements = []string{
	// Services and addresses.
	"S01", "S02", "S03", "S04", "S05", "S06", "S07", "S08", "S09", "S10", "S11", "S12", "S13",
	// Endpoint selection.
	"S20", "S21", "S22", "S23", "S24", "S25", "S26", "S27", "S28", "S29", "S30",
	// Policies, short cuts, rejecting and dropping, source ranges, masquerading.
	"S40", "S41", "S42", "S43", "S44", "S45", "S46", "S47", "S48", "S49", "S50", "S51", "S52", "S53",
	// Affinity.
	"S60", "S61", "S62", "S63", "S64",
	// Long-lived flows.
	"S70", "S71", "S72", "S73", "S74", "S75",
	// Protocols, ports, replies.
	"S80", "S81", "S82", "S83", "S84", "S85", "S86", "S87", "S88",
	// Shares of connections.
	"S91", "S92", "S93", "S94", "S95", "S96", "S97", "S98", "S99", "S100",
	// Configuration that affects decisions, health checks, feature gates.
	"C40", "C41", "C42", "C43", "C53", "C65",
}

// undecided are statements that do not affect decisions, with the reason.
var undecided = map[string]string{
	"S13": "ICMP echo: has no ports, while tables contain only frontends with ports",
	"S52": "source ports of masqueraded traffic: each tier's NAT chooses them",
	"S64": "number of clients with affinity: depends on the capacity of each tier",
	"S74": "invalid packets: handled by packet filters",
	"S75": "packets that conntrack must see: depends on the host's kernel",
	"S82": "the path of replies: depends on the tier; every answer here tests it",
	"S83": "large datagrams and fragments: all requests of scenarios are small",
	"S84": "ICMP errors of translated flows: each tier's NAT translates them",
	"S98": "direct server return: depends on what other nodes run; test/e2e plays it with three nodes",
	"S87": "the order of programming: the final table does not depend on it",
}

func TestStatements(t *testing.T) {
	shown := map[string]bool{}
	for _, s := range all(t) {
		for _, n := range s.Statements {
			shown[n] = true
			if !slices.Contains(statements, n) {
				t.Errorf("%s.txtar: there is no statement %s", s.Name, n)
			}
		}
		if len(s.Statements) == 0 {
			t.Errorf("%s.txtar: no statement listed", s.Name)
		}
	}
	for _, n := range statements {
		switch why, not := undecided[n]; {
		case shown[n] && not:
			t.Errorf("statement %s has a scenario, but is in undecided: %s", n, why)
		case !shown[n] && !not:
			t.Errorf("statement %s has no scenario", n)
		}
	}
	for n := range undecided {
		if !slices.Contains(statements, n) {
			t.Errorf("there is no statement %s", n)
		}
	}
}

// Every expected backend has a listener.
func TestListeners(t *testing.T) {
	for _, s := range all(t) {
		listeners, err := s.Listeners()
		if err != nil {
			t.Fatal(err)
		}
		for i := range s.Steps {
			var e *Expectation
			switch c := s.Steps[i].Command.(type) {
			case Reach:
				e = &c.Expect
			case Flow:
				e = &c.Expect
			default:
				continue
			}
			for _, b := range e.Backends {
				if !slices.ContainsFunc(listeners, func(l Listener) bool { return l.Name == b }) {
					t.Errorf("%s.txtar:%d: expected backend %s has no listener", s.Name, s.Steps[i].Line, b)
				}
			}
		}
	}
}
