// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"maps"
	"slices"
)

// maxDepth is how deep chains may be nested below a built-in one: nftables refuses the
// sixteenth jump. Legacy iptables has no such limit.
const maxDepth = 15

// reach is what follows for who jumps to a chain.
type reach struct {
	depth int   // of the jumps below it
	hooks hooks // from which a packet may come
	rule  *rule // the last that limited the hooks
	busy  bool  // being worked out: who meets it has gone in a circle
}

// check finds what the kernel refuses only when it sees the whole table. It returns
// the line of the rule at fault; zero if that was there before.
func (c *change) check() (line int, err error) {
	known := map[string]*reach{}
	for _, name := range slices.Sorted(maps.Keys(c.table.chains)) {
		r, rule, err := c.reach(name, known)
		if err != nil {
			return c.lines[rule], err
		}
		chain := c.table.chains[name]
		switch {
		case chain.hook&^r.hooks != 0:
			return c.lines[r.rule], fmt.Errorf("a packet of %s gets to %q, where it may not be", name, r.rule.text)
		case chain.hook != 0 && r.depth > maxDepth:
			return c.line, fmt.Errorf("more than %d jumps below %s", maxDepth, name)
		}
	}
	return 0, nil
}

// reach works a chain out, and all below it. With an error comes the rule that jumps
// back.
func (c *change) reach(name string, known map[string]*reach) (*reach, *rule, error) {
	if r := known[name]; r != nil {
		return r, nil, nil
	}
	at := &reach{hooks: anyHook, busy: true}
	known[name] = at
	for _, r := range c.table.chains[name].rules {
		switch {
		case r.target != nil:
			at.limit(r.target.hooks(), r)
		case r.jump != "":
			below, rule, err := c.reach(r.jump, known)
			if err != nil {
				return nil, rule, err
			}
			if below.busy {
				return nil, r, fmt.Errorf("chain %s leads back to itself by %q of %s", r.jump, r.text, name)
			}
			at.limit(below.hooks, below.rule)
			at.depth = max(at.depth, below.depth+1)
		}
	}
	at.busy = false
	return at, nil, nil
}

func (r *reach) limit(to hooks, by *rule) {
	if r.hooks&^to != 0 {
		r.hooks &= to
		r.rule = by
	}
}
