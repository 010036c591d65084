// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// Error is a line that could not be restored. Its table is unchanged; tables whose COMMIT
// precedes it are changed.
type Error struct {
	Line int // from 1
	Err  error
}

func (e *Error) Error() string { return fmt.Sprintf("restore line %d: %v", e.Line, e.Err) }

// Unwrap returns what is wrong with the line.
func (e *Error) Unwrap() error { return e.Err }

// Restore applies the input as iptables-restore --noflush does. A failure is an *Error.
func (t *Tables) Restore(input []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var c *change
	lines := strings.Split(strings.TrimSuffix(string(input), "\n"), "\n")
	for i, line := range lines {
		fail := func(err error) error { return &Error{Line: i + 1, Err: err} }
		switch {
		case strings.TrimSpace(line) == "", strings.HasPrefix(line, "#"):
		case strings.HasPrefix(line, "*"):
			if c != nil {
				return fail(fmt.Errorf("table %s lacks its COMMIT", c.table.name))
			}
			table := t.tables[strings.TrimSpace(line[1:])]
			if table == nil {
				return fail(fmt.Errorf("unknown table %q", line[1:]))
			}
			c = t.begin(table)
		case c == nil:
			return fail(errors.New("no table"))
		case line == "COMMIT":
			if at, err := c.check(); err != nil {
				return &Error{Line: at, Err: err}
			}
			t.tables[c.table.name] = c.table
			t.generation++
			t.forgetLists()
			c = nil
		default:
			c.line = i + 1
			if err := c.apply(line); err != nil {
				return fail(err)
			}
		}
	}
	if c != nil {
		return &Error{Line: len(lines), Err: fmt.Errorf("table %s lacks its COMMIT", c.table.name)}
	}
	return nil
}

// change is a table under construction. It shares unchanged chains with the table that
// it is based on.
type change struct {
	tables *Tables
	table  *table
	own    map[*chain]bool
	refs   map[string]int // number of jumps to a chain
	lines  map[*rule]int  // line of a rule of this change
	line   int
}

func (t *Tables) begin(from *table) *change {
	c := &change{tables: t, table: &table{name: from.name, chains: maps.Clone(from.chains)}, own: map[*chain]bool{}, refs: map[string]int{}, lines: map[*rule]int{}}
	for _, chain := range from.chains {
		c.refer(chain.rules, 1)
	}
	return c
}

func (c *change) refer(rules []*rule, by int) {
	for _, r := range rules {
		if r.jump != "" {
			c.refs[r.jump] += by
		}
	}
}

// chain returns a chain that may be changed.
func (c *change) chain(name string) (*chain, error) {
	old := c.table.chains[name]
	switch {
	case old == nil:
		return nil, fmt.Errorf("no chain %q in table %s", name, c.table.name)
	case c.own[old]:
		return old, nil
	}
	copied := *old
	copied.rules = slices.Clone(old.rules)
	c.table.chains[name] = &copied
	c.own[&copied] = true
	return &copied, nil
}

// apply executes one line.
func (c *change) apply(line string) error {
	if strings.HasPrefix(line, ":") {
		return c.declare(strings.Fields(line[1:]))
	}
	list, err := split(line)
	if err != nil {
		return err
	}
	if len(list) < 2 {
		return fmt.Errorf("%q is not a command with a chain", line)
	}
	command, name, w := list[0], list[1], &words{list: list[2:]}
	chain, err := c.chain(name)
	if err != nil {
		return err
	}
	switch command {
	case "-A":
		return c.insert(chain, len(chain.rules), w)
	case "-I":
		at, err := number(w, 1)
		if err != nil {
			return err
		}
		if at < 1 || at > len(chain.rules)+1 {
			return fmt.Errorf("chain %s has no position %d", name, at)
		}
		return c.insert(chain, at-1, w)
	case "-D":
		return c.remove(chain, w)
	}
	if len(w.list) > 0 {
		return fmt.Errorf("unknown argument %q of %s", w.list[0], command)
	}
	switch command {
	case "-F":
		c.flush(chain)
		return nil
	case "-X":
		switch {
		case chain.hook != 0:
			return fmt.Errorf("chain %s is built in", name)
		case len(chain.rules) > 0:
			return fmt.Errorf("chain %s has rules", name)
		case c.refs[name] > 0:
			return fmt.Errorf("chain %s is jumped to", name)
		}
		delete(c.table.chains, name)
		return nil
	}
	return fmt.Errorf("unknown command %q", command)
}

// declare parses ":CHAIN POLICY [0:0]".
func (c *change) declare(fields []string) error {
	if len(fields) < 2 || len(fields) > 3 {
		return errors.New("want name, policy and counters of a chain")
	}
	name, policy := fields[0], fields[1]
	old := c.table.chains[name]
	if old != nil && old.hook != 0 {
		if policy == "-" {
			return nil
		}
		if policy != "ACCEPT" && (policy != "DROP" || c.table.name == "nat") {
			return fmt.Errorf("policy %q of chain %s of table %s", policy, name, c.table.name)
		}
		chain, err := c.chain(name)
		if err == nil {
			chain.policy = policy
		}
		return err
	}
	if policy != "-" {
		return fmt.Errorf("policy %q of chain %s, which is not built in", policy, name)
	}
	if old == nil {
		if err := checkName(name); err != nil {
			return err
		}
		old = &chain{name: name}
		c.table.chains[name], c.own[old] = old, true
	}
	chain, err := c.chain(name)
	if err == nil {
		c.flush(chain)
	}
	return err
}

// nameLength is the maximum length of a chain's name: the kernel has 29 bytes for the name
// of a target, including the terminating zero.
const nameLength = 28

func checkName(name string) error {
	switch {
	case len(name) > nameLength:
		return fmt.Errorf("chain name %q is longer than %d characters", name, nameLength)
	case strings.HasPrefix(name, "-"), strings.HasPrefix(name, "!"), newTarget(name, proxier.IPv4) != nil:
		return fmt.Errorf("chain name %q", name)
	}
	return nil
}

func (c *change) flush(chain *chain) {
	c.refer(chain.rules, -1)
	chain.rules = nil
}

func (c *change) insert(chain *chain, at int, w *words) error {
	r, err := c.parse(chain, w)
	if err != nil {
		return err
	}
	chain.rules = slices.Insert(chain.rules, at, r)
	c.refer([]*rule{r}, 1)
	c.lines[r] = c.line
	return nil
}

func (c *change) remove(chain *chain, w *words) error {
	at, err := number(w, 0)
	if err != nil {
		return err
	}
	if at == 0 {
		r, err := c.parse(chain, w)
		if err != nil {
			return err
		}
		at = 1 + slices.IndexFunc(chain.rules, func(other *rule) bool { return other.text == r.text })
	}
	if at < 1 || at > len(chain.rules) {
		return fmt.Errorf("chain %s has no such rule", chain.name)
	}
	c.refer(chain.rules[at-1:at], -1)
	chain.rules = slices.Delete(chain.rules, at-1, at)
	return nil
}

// parse parses a rule for a chain of this table.
func (c *change) parse(chain *chain, w *words) (*rule, error) {
	r, err := parseRule(c.tables.family, w)
	if err != nil {
		return nil, err
	}
	if r.jump != "" && (c.table.chains[r.jump] == nil || c.table.chains[r.jump].hook != 0) {
		return nil, fmt.Errorf("no chain or target %q", r.jump)
	}
	for _, m := range r.matches {
		if m, ok := m.(*counter); ok {
			if err := c.tables.find(m.name); err != nil {
				return nil, err
			}
		}
	}
	switch {
	case r.in.name != "" && chain.hook&(output|postrouting) != 0:
		return nil, fmt.Errorf("-i in %s", chain.name)
	case r.out.name != "" && chain.hook&(input|prerouting) != 0:
		return nil, fmt.Errorf("-o in %s", chain.name)
	}
	if r.target != nil {
		if only := r.target.table(); only != "" && only != c.table.name {
			return nil, fmt.Errorf("%s belongs into table %s", r.target, only)
		}
		if c.table.name == "nat" && r.target == verdict("DROP") {
			return nil, errors.New("table nat must not drop packets")
		}
	}
	return r, nil
}

// number consumes a number, if the next word is one.
func number(w *words, without int) (int, error) {
	if len(w.list) == 0 || w.list[0] == "" || w.list[0][0] < '0' || w.list[0][0] > '9' {
		return without, nil
	}
	n, err := strconv.Atoi(w.next())
	if err == nil && n < 1 {
		err = errors.New("positions start at 1")
	}
	return n, err
}
