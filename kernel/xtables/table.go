// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Table is a table as iptables-save prints it.
type Table struct {
	Name   string
	Chains []Chain

	index map[string]int // into Chains; nil if it was not parsed
}

// Chain is a chain of a table.
type Chain struct {
	Name   string
	Policy string // "-" for all but built-in chains
	// Rules are as printed, without counters and "-A NAME ".
	Rules []string
}

// Chain returns the chain with a name, or nil.
func (t *Table) Chain(name string) *Chain {
	i, ok := t.index[name]
	if !ok || i >= len(t.Chains) || t.Chains[i].Name != name {
		i = slices.IndexFunc(t.Chains, func(c Chain) bool { return c.Name == name })
	}
	if i < 0 {
		return nil
	}
	return &t.Chains[i]
}

// parser reads the output of iptables-save. A table may have 100,000 rules, so all names and rules
// are substrings of the text, and chains have parts of one slice of rules.
type parser struct {
	rest   string
	number int // of the line

	tables  []*Table
	table   *Table // the one being read, until its COMMIT
	chain   *Chain // the one of the last rule
	rules   []string
	started int // where the chain's rules start
}

func parse(text string) ([]*Table, error) {
	p := parser{rest: text, rules: make([]string, 0, strings.Count(text, "\n"))}
	for p.rest != "" {
		line, err := p.line()
		if err == nil {
			err = p.read(line)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w: %.100q", p.number, err, line)
		}
	}
	if p.table != nil {
		return nil, fmt.Errorf("line %d: the text ends within table %s", p.number, p.table.Name)
	}
	return p.tables, nil
}

// line returns the next line, which continues after line breaks in comments of rules: these
// are printed unescaped.
func (p *parser) line() (string, error) {
	p.number++
	line, rest, _ := strings.Cut(p.rest, "\n")
	if strings.HasPrefix(line, "-") || strings.HasPrefix(line, "[") {
		for number := p.number; quoteOpen(line); p.number++ {
			if rest == "" {
				p.number = number
				return line, errors.New("a quote does not end")
			}
			var more string
			more, rest, _ = strings.Cut(rest, "\n")
			line = p.rest[:len(line)+1+len(more)]
		}
	}
	p.rest = rest
	return line, nil
}

func quoteOpen(line string) (open bool) {
	i := strings.IndexByte(line, '"')
	if i < 0 {
		return false
	}
	for ; i < len(line); i++ {
		switch {
		case line[i] == '"':
			open = !open
		case line[i] == '\\' && open:
			i++
		}
	}
	return open
}

func (p *parser) read(line string) error {
	if strings.HasPrefix(line, "#") {
		return nil
	}
	if name, ok := strings.CutPrefix(line, "*"); ok {
		if p.table != nil {
			return errors.New("a table within a table")
		}
		p.table = &Table{Name: name, index: map[string]int{}}
		p.tables = append(p.tables, p.table)
		return nil
	}
	if p.table == nil {
		return errors.New("not in a table")
	}
	if line == "COMMIT" {
		p.table, p.chain = nil, nil
		return nil
	}
	if def, ok := strings.CutPrefix(line, ":"); ok {
		return p.define(def)
	}
	if strings.HasPrefix(line, "[") { // counters
		_, line, _ = strings.Cut(line, "] ")
	}
	if rule, ok := strings.CutPrefix(line, "-A "); ok {
		return p.add(rule)
	}
	return errors.New("neither a table, a chain, a rule nor a comment")
}

// define reads "KUBE-SERVICES - [0:0]".
func (p *parser) define(line string) error {
	name, rest, ok := strings.Cut(line, " ")
	if !ok {
		return errors.New("a chain without a policy")
	}
	if _, twice := p.table.index[name]; twice {
		return errors.New("a chain is defined twice")
	}
	policy, _, _ := strings.Cut(rest, " ")
	p.table.index[name] = len(p.table.Chains)
	p.table.Chains = append(p.table.Chains, Chain{Name: name, Policy: policy})
	p.chain = nil // appending may have moved it
	return nil
}

// add reads "KUBE-SERVICES -d 10.96.0.1/32 -j …". The rules of a chain usually follow each
// other.
func (p *parser) add(line string) error {
	name, rule, _ := strings.Cut(line, " ")
	if p.chain == nil || p.chain.Name != name {
		i, ok := p.table.index[name]
		if !ok {
			return errors.New("a rule of a chain that is not defined")
		}
		p.chain, p.started = &p.table.Chains[i], len(p.rules)
		if len(p.chain.Rules) > 0 {
			p.rules = append(p.rules, p.chain.Rules...)
		}
	}
	p.rules = append(p.rules, rule)
	p.chain.Rules = p.rules[p.started:len(p.rules):len(p.rules)]
	return nil
}
