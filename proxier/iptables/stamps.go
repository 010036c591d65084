// SPDX-License-Identifier: Apache-2.0

package iptables

import "hash/maphash"

// stamp identifies the rules of a chain, which are not kept.
type stamp struct {
	hash  uint64
	rules int
}

var seed = maphash.MakeSeed()

func stampOf(rules []string) stamp {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, r := range rules {
		_, _ = h.WriteString(r) // never fails
		_ = h.WriteByte('\n')
	}
	return stamp{h.Sum64(), len(rules)}
}

// chainStamps are the chains of service ports that are in the kernel.
type chainStamps struct {
	chains map[string]stamp
	rules  int // of all of them
}

func newChainStamps() chainStamps { return chainStamps{chains: map[string]stamp{}} }

func (c *chainStamps) set(name string, s stamp) {
	c.rules += s.rules - c.chains[name].rules
	c.chains[name] = s
}

func (c *chainStamps) forget(name string) {
	c.rules -= c.chains[name].rules
	delete(c.chains, name)
}

func (c *chainStamps) clear() {
	clear(c.chains)
	c.rules = 0
}

// is reports whether a chain is in the kernel with exactly these rules.
func (c *chainStamps) is(name string, s stamp) bool {
	current, there := c.chains[name]
	return there && current == s
}
