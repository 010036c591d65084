// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

// Tables and the oracle format their answers as the same text.

func head(origin proxier.Origin, outcome proxier.Outcome) string {
	return "from " + origin.String() + ": " + outcome.String() + "\n"
}

func body(owner proxier.ServicePortName, kind proxier.Kind, affinity time.Duration, outcome proxier.Outcome, source proxier.Source, backends []netip.AddrPort) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %s affinity %s", owner, owner.Protocol, kind, affinity)
	if outcome == proxier.Forward {
		fmt.Fprintf(&b, " source %d", source)
	}
	for _, a := range backends {
		b.WriteString(" " + a.String())
	}
	return b.String() + "\n"
}

func (a *Answer) String() string {
	if a.Kind == 0 {
		return head(a.Origin, a.Outcome)
	}
	backends := a.Backends
	if a.Outcome != proxier.Forward {
		backends = nil
	}
	return head(a.Origin, a.Outcome) + body(a.Owner, a.Kind, a.Affinity, a.Outcome, a.Source, backends)
}

// reasons formats all facts about the endpoints.
func (a *Answer) reasons(client netip.Addr) string {
	var b strings.Builder
	for _, at := range slices.SortedFunc(maps.Keys(a.Endpoints), netip.AddrPort.Compare) {
		e := a.Endpoints[at]
		// Sets that no frontend uses do not matter to a tier.
		var members proxier.Members
		if a.UsesCluster && e.Cluster.In() {
			members |= proxier.InCluster
		}
		if a.UsesLocal && e.Local.In() {
			members |= proxier.InLocal
		}
		// UDP flows stay as long as their endpoint serves (S71).
		kept := members != 0 || a.Owner.Protocol == proxier.UDP && e.Serving
		hairpin := client == at.Addr() && slices.Contains(a.Backends, at)
		reason(&b, at, e.Cluster, e.Local, e.Slice, e.Copies, e.OnNode, e.Terminating, hairpin, kept, members)
	}
	return b.String()
}

func reason(b *strings.Builder, at netip.AddrPort, cluster, local proxier.Why, slice string, copies int, onNode, terminating, hairpin, kept bool, members proxier.Members) {
	fmt.Fprintf(b, "%s cluster %s, local %s, slice %s of %d", at, cluster, local, slice, copies)
	for i, word := range []string{"on-node", "terminating", "hairpin"} {
		if []bool{onNode, terminating, hairpin}[i] {
			b.WriteString(" " + word)
		}
	}
	if kept {
		fmt.Fprintf(b, " kept for sets %b", members)
	}
	b.WriteByte('\n')
}

func explained(e *proxier.Explanation) (answer, reasons string) {
	if e.Decision == nil {
		return head(e.Origin, e.Outcome), ""
	}
	var b strings.Builder
	var backends []netip.AddrPort
	copies := map[netip.AddrPort]int{}
	for i := range e.Endpoints {
		copies[e.Endpoints[i].Addr]++
	}
	kept := map[netip.AddrPort]proxier.Backend{}
	for _, o := range e.Decision.Backends {
		kept[o.Addr] = o
		if family(o.Addr.Addr()) == family(e.Flow.Destination.Addr()) && copies[o.Addr] == 0 {
			fmt.Fprintf(&b, "%s is a backend, but no endpoint\n", o.Addr)
		}
	}
	for i := range e.Endpoints {
		j := &e.Endpoints[i]
		if j.Duplicate {
			continue
		}
		in := e.Outcome == proxier.Forward && j.In(e.Route.Set)
		k, isKept := kept[j.Addr]
		if isKept && (k.Local != j.Backend.Local || k.Terminating != j.Terminating) {
			fmt.Fprintf(&b, "%s is a backend as %s\n", j.Addr, &k)
		}
		reason(&b, j.Addr, j.Cluster, j.Local, j.Slice, copies[j.Addr], j.Backend.Local, j.Terminating, j.Hairpin && in, isKept, k.Members)
		if in {
			backends = append(backends, j.Addr)
		}
	}
	return head(e.Origin, e.Outcome) + body(e.Decision.Name, e.Frontend.Kind, e.Decision.Affinity, e.Outcome, e.Route.Source, backends), b.String()
}

// frontendsOf lists the frontends of a table as Cluster.Frontends does.
func frontendsOf(table *proxier.Table) []Frontend {
	var list []Frontend
	for _, c := range table.All() {
		for i := range c.New.Frontends {
			f := &c.New.Frontends[i]
			l := Frontend{Addr: f.Addr, Kind: f.Kind, Owner: c.New.Name, Unguarded: f.Unguarded, AdmitsItself: f.Admits(f.Addr.Addr())}
			if f.Conflict != nil {
				l.Winner = *f.Conflict
			}
			list = append(list, l)
		}
	}
	slices.SortFunc(list, Frontend.compare)
	return list
}

func frontendsText(list []Frontend) string {
	var b strings.Builder
	for _, f := range list {
		fmt.Fprintf(&b, "%s/%s %s of %s", f.Addr, f.Owner.Protocol, f.Kind, f.Owner)
		if f.Winner != (proxier.ServicePortName{}) {
			fmt.Fprintf(&b, ", but %s/%s has it", f.Winner, f.Winner.Protocol)
		}
		if f.Unguarded {
			b.WriteString(", unguarded")
		}
		if !f.AdmitsItself {
			b.WriteString(", not for itself")
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// failure is a disagreement.
type failure struct {
	what string // answer, reasons, rivals, mirror, tier, frontends, health, dump, changes, panic
	flow proxier.Flow
	text string
}

func disagree(what string, flow proxier.Flow, got, want string) *failure {
	if got == want {
		return nil
	}
	text := fmt.Sprintf("got:\n%s\nwant:\n%s", got, want)
	if flow.Destination.IsValid() {
		text = fmt.Sprintf("%s -> %s %s by %q\n%s", flow.Source, flow.Destination, flow.Protocol, flow.Device, text)
	}
	return &failure{what, flow, text}
}

// wrongAnswer, if set, falsifies the oracle's answers, to test how disagreements are handled.
type wrongAnswer func(*Answer)

// checkFlow compares the answers about a flow.
func checkFlow(s subject, c *Cluster, flow proxier.Flow, spoil wrongAnswer) *failure {
	want := c.Ask(flow)
	if spoil != nil {
		spoil(&want)
	}
	e := s.table().Explain(flow)
	answer, reasons := explained(&e)
	if f := disagree("answer", flow, answer, want.String()); f != nil {
		return f
	}
	if f := disagree("mirror", flow, s.mirror().ask(flow, c.Facts.LocalAddrs), want.String()); f != nil {
		return f
	}
	if f := disagree("reasons", flow, reasons, want.reasons(flow.Source.Addr())); f != nil {
		return f
	}
	rivals := slices.Clone(e.Rivals)
	slices.SortFunc(rivals, comparePorts)
	if f := disagree("rivals", flow, fmt.Sprint(rivals), fmt.Sprint(want.Rivals)); f != nil {
		return f
	}
	if e.Flow != flow || e.Reason == "" {
		return &failure{"answer", flow, fmt.Sprintf("flow %v is explained as %v: %q", flow, e.Flow, e.Reason)}
	}
	if t := s.testedTier(); t != nil {
		if err := t.Check(c, flow, &want); err != nil {
			return &failure{"tier", flow, fmt.Sprintf("%s -> %s %s by %q: %v\nwant:\n%s", flow.Source, flow.Destination, flow.Protocol, flow.Device, err, &want)}
		}
	}
	return nil
}

// checkState compares state that does not depend on a flow.
func checkState(s subject, c *Cluster) *failure {
	if err := s.mirror().check(s.table()); err != nil {
		return &failure{what: "changes", text: err.Error()}
	}
	if f := disagree("frontends", proxier.Flow{}, frontendsText(frontendsOf(s.table())), frontendsText(c.Frontends())); f != nil {
		return f
	}
	return disagree("health", proxier.Flow{}, healthText(s.table().HealthChecks()), healthText(c.HealthChecks()))
}

func healthText(checks map[types.NamespacedName]proxier.HealthCheck) string {
	var b strings.Builder
	for _, name := range sorted(checks) {
		fmt.Fprintf(&b, "%s %+v\n", name, checks[name])
	}
	return b.String()
}

// checkDump compares with a table that gets only the final state, in another order.
func checkDump(s subject, c *Cluster, seed uint64) *failure {
	rng := rand.New(rand.NewPCG(seed, 0))
	var events []event
	for _, o := range c.Services {
		events = append(events, event{service: o})
	}
	for _, o := range c.Slices {
		events = append(events, event{slice: o})
	}
	rng.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
	fresh, told := newDirect(&history{facts: c.Facts, policy: c.Policy}), newObjects()
	for _, e := range events {
		told.tell(fresh, e)
		if rng.IntN(4) == 0 {
			fresh.sync()
		}
	}
	fresh.sync()
	return disagree("dump", proxier.Flow{}, s.table().Dump(), fresh.table().Dump())
}
