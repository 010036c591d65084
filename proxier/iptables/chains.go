// SPDX-License-Identifier: Apache-2.0

package iptables

// stamp is what is remembered of a chain's rules.
type stamp struct {
	hash  uint64
	rules int
}

func stampOf(rules []string) stamp { return stamp{hashOf(rules), len(rules)} }

// chainStamps are the chains that are there of service ports, and count their rules.
type chainStamps struct {
	chains map[string]stamp
	rules  int
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

// is says whether a chain is there with just these rules.
func (c *chainStamps) is(name string, s stamp) bool {
	now, there := c.chains[name]
	return there && now == s
}
