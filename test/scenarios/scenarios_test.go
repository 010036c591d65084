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
			defer func() { // so that one scenario costs no other its result
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

// statements are those of docs/semantics.md that scenarios can show.
var statements = []string{
	// Which Services and addresses.
	"S01", "S02", "S03", "S04", "S05", "S06", "S07", "S08", "S09", "S10", "S11", "S12", "S13",
	// Which endpoints.
	"S20", "S21", "S22", "S23", "S24", "S25", "S26", "S27", "S28", "S29", "S30",
	// Policies, short cuts, refusal and silence, source ranges, masquerading.
	"S40", "S41", "S42", "S43", "S44", "S45", "S46", "S47", "S48", "S49", "S50", "S51", "S52", "S53",
	// Affinity.
	"S60", "S61", "S62", "S63", "S64",
	// Flows that last.
	"S70", "S71", "S72", "S73", "S74", "S75",
	// Protocols, ports, the way back.
	"S80", "S81", "S82", "S83", "S84", "S85", "S86", "S87", "S88",
	// Configuration that decides, health checks, feature gates.
	"C40", "C41", "C42", "C43", "C53", "C65",
}

// undecided are statements that no decision depends on, and why.
var undecided = map[string]string{
	"S13": "ICMP echo: tiers see no port, and tables know none",
	"S52": "source ports of masqueraded traffic: each tier's own NAT chooses them",
	"S64": "how many clients an affinity remembers: a size of each tier's memory",
	"S74": "packets out of state: a matter of packet filters",
	"S75": "what conntrack has to see: a contract of the host's kernel",
	"S82": "the path of replies: each tier's, and without it nothing here gets an answer",
	"S83": "large datagrams and fragments: content of calls, all of which are small here",
	"S84": "ICMP errors of translated flows: each tier's NAT translates them",
	"S87": "what is programmed first: the order of a sync, which ends in the same table",
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
			t.Errorf("%s.txtar: shows no statement", s.Name)
		}
	}
	for _, n := range statements {
		switch why, not := undecided[n]; {
		case shown[n] && not:
			t.Errorf("statement %s has a scenario, and a reason to have none: %s", n, why)
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

// What a runner has to serve, and what is worth being served.
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
					t.Errorf("%s.txtar:%d: %s is expected, and listens nowhere", s.Name, s.Steps[i].Line, b)
				}
			}
		}
	}
}
