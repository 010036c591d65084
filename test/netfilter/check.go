// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// maxDepth is how deep chains may be nested below a built-in one: nftables rejects the
// sixteenth jump. Legacy iptables has no such limit.
const maxDepth = 15

// reach has the limits of a chain that apply to jumps to it.
type reach struct {
	depth int   // of the jumps below it
	hooks hooks // from which a packet may come
	rule  *rule // the last that limited the hooks
	line  int   // of that rule, or of the jump to it; zero if both existed before
	busy  bool  // being computed; meeting it again means a loop
}

// check finds errors that the kernel detects only in a complete table. It returns an error
// with the line of a wrong rule.
func (c *change) check() (line int, err error) {
	known := map[string]*reach{}
	for _, name := range slices.Sorted(maps.Keys(c.table.chains)) {
		r, line, err := c.reach(name, known)
		if err != nil {
			return line, err
		}
		chain := c.table.chains[name]
		switch {
		case chain.hook&^r.hooks != 0:
			return r.line, fmt.Errorf("a packet of %s reaches %q, which is not valid there", name, r.rule.text)
		case chain.hook != 0 && r.depth > maxDepth:
			return c.line, fmt.Errorf("more than %d jumps below %s", maxDepth, name)
		}
	}
	return 0, nil
}

// reach computes the limits of a chain, and of all chains below it.
func (c *change) reach(name string, known map[string]*reach) (_ *reach, line int, err error) {
	if r := known[name]; r != nil {
		return r, 0, nil
	}
	at := &reach{hooks: anyHook, busy: true}
	known[name] = at
	for _, r := range c.table.chains[name].rules {
		switch {
		case r.target != nil:
			at.limit(r.target.hooks(), r, c.lines[r])
		case r.jump != "":
			below, line, err := c.reach(r.jump, known)
			if err == nil && below.busy {
				err = fmt.Errorf("chain %s leads back to itself by %q of %s", r.jump, r.text, name)
			}
			if err != nil {
				return nil, cmp.Or(line, c.lines[r]), err
			}
			at.limit(below.hooks, below.rule, cmp.Or(below.line, c.lines[r]))
			at.depth = max(at.depth, below.depth+1)
		}
	}
	at.busy = false
	return at, 0, nil
}

func (r *reach) limit(to hooks, by *rule, line int) {
	if r.hooks&^to != 0 {
		r.hooks &= to
		r.rule, r.line = by, line
	}
}
