// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/tools/txtar"

	"github.com/tandem-proxy/tandem/proxier"
)

// Format writes a scenario as a file; Parse reads it back.
func Format(s *Scenario) []byte {
	var b strings.Builder
	line := func(words ...string) {
		b.WriteString(strings.Join(words, " "))
		b.WriteByte('\n')
	}
	line("#", s.Title)
	for _, n := range s.Notes {
		line(strings.TrimSpace("# " + n))
	}
	line(append([]string{"# Statements:"}, s.Statements...)...)
	line()
	for _, n := range s.Nodes {
		if n.Zone == "" {
			line("node", n.Name)
		} else {
			line("node", n.Name, "zone="+n.Zone)
		}
	}
	for _, p := range s.Pods {
		line("pod", p.Name, p.Node)
	}
	for _, c := range s.Clients {
		line("client", c)
	}
	for i := range s.Steps {
		for _, a := range s.Steps[i].Above {
			line(a)
		}
		line(s.Steps[i].Command.words(s)...)
	}
	line()
	a := txtar.Archive{Comment: []byte(b.String())}
	for _, f := range s.Files {
		a.Files = append(a.Files, txtar.File{Name: f.Name, Data: []byte(f.Data)})
	}
	return txtar.Format(&a)
}

func (c Configure) words(*Scenario) []string {
	words := []string{"config"}
	for _, s := range c.Settings {
		words = append(words, s.Key+"="+s.Value)
	}
	return words
}

func (c Apply) words(*Scenario) []string { return []string{"apply", c.File} }

func (c Delete) words(*Scenario) []string {
	return []string{"delete", c.Kind, c.Namespace + "/" + c.Name}
}

func (c Announce) words(*Scenario) []string {
	return append([]string{"announce", c.Prefix.String()}, c.Nodes...)
}

func (c Address) words(*Scenario) []string {
	how := "add"
	if c.Gone {
		how = "del"
	}
	return []string{"address", how, c.Node, c.Addr.String()}
}

func (c Override) words(*Scenario) []string {
	backend := c.Addr.String()
	if c.Port != 0 {
		backend = netip.AddrPortFrom(c.Addr, c.Port).String()
	}
	words := []string{"backend", overrides[c.State], c.Node, backend}
	if c.Service.Name != "" {
		words = append(words, c.Service.String())
	}
	return words
}

func (c Restart) words(*Scenario) []string { return []string{"restart", c.Node} }

func (c Table) words(*Scenario) []string { return []string{"table", c.Node, c.File} }

func (c Changes) words(*Scenario) []string { return []string{"changes", c.Node, c.File} }

func (c HealthCheck) words(*Scenario) []string {
	words := []string{"healthcheck", c.Node, c.Namespace + "/" + c.Name}
	if c.None {
		return append(words, "none")
	}
	return append(words, fmt.Sprintf("ipv4=%d", c.Ready[proxier.IPv4]), fmt.Sprintf("ipv6=%d", c.Ready[proxier.IPv6]))
}

func (c Problem) words(*Scenario) []string {
	field := c.Field
	if field == "" {
		field = "-"
	}
	return []string{"problem", c.Kind, c.Namespace + "/" + c.Name, field, c.Reason}
}

func (c Reach) words(s *Scenario) []string {
	return append(append([]string{"reach"}, c.Call.words(s)...), c.Expect.words()...)
}

func (c Flow) words(s *Scenario) []string {
	words := []string{"flow", c.Label}
	if c.Call != nil {
		words = append(words, c.Call.words(s)...)
	}
	return append(words, c.Expect.words()...)
}

func (c *Call) words(s *Scenario) []string {
	words := []string{s.kindOf(c.From), c.From, "->", c.To.String()}
	if c.Via != "" {
		words = append(words, "via", c.Via)
	}
	return words
}

func (e *Expectation) words() []string {
	words := []string{":", e.Outcome.String()}
	if e.Outcome == Backends {
		words = append(words, strings.Join(e.Backends, ","))
	}
	if e.Source != "" {
		words = append(words, "source", e.Source)
	}
	switch {
	case e.Label != "":
		words = append(words, "sticky="+e.Label)
	case e.Sticky:
		words = append(words, "sticky")
	}
	return words
}

func joinPrefixes(list []netip.Prefix) string {
	words := make([]string, len(list))
	for i, p := range list {
		words[i] = p.String()
	}
	return strings.Join(words, ",")
}
