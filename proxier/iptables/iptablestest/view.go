// SPDX-License-Identifier: Apache-2.0

package iptablestest

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// SharedChain is a chain that all service ports share. Long ones are split into trees: the chain
// itself jumps to its slots.
type SharedChain struct {
	Table, Name string
	// slots is the prefix of the names of the slots.
	slots string
}

var sharedChains = []SharedChain{
	{"nat", "KUBE-SERVICES", "KUBE-SVC-SLOT-"},
	{"nat", "KUBE-NODEPORTS", "KUBE-EXT-SLOT-"},
	{"filter", "KUBE-SERVICES", "KUBE-SERVICES-"},
	{"filter", "KUBE-EXTERNAL-SERVICES", "KUBE-EXTERNAL-SERVICES-"},
	{"filter", "KUBE-REFUSED-PORTS", "KUBE-REFUSED-PORTS-"},
	{"filter", "KUBE-PROXY-FIREWALL", "KUBE-PROXY-FIREWALL-"},
	{"filter", "KUBE-NODEPORTS", "KUBE-NODEPORTS-"},
}

func (s *SharedChain) owns(chain string) bool {
	return chain == s.Name || strings.HasPrefix(chain, s.slots)
}

// SharedChainOf returns the shared chain that "table chain" is part of, or nil.
func SharedChainOf(at string) *SharedChain {
	table, chain, _ := strings.Cut(at, " ")
	for i := range sharedChains {
		if s := &sharedChains[i]; s.Table == table && s.owns(chain) {
			return s
		}
	}
	return nil
}

// ChainName returns the name of a chain of a service port, or of one of its endpoints. As
// upstream's, it is a prefix and the beginning of a hash.
func ChainName(prefix string, port proxier.ServicePortName, endpoint string) string {
	hash := sha256.Sum256([]byte(port.String() + strings.ToLower(port.Protocol.String()) + endpoint))
	return prefix + base32.StdEncoding.EncodeToString(hash[:])[:16]
}

// servicePortPrefixes are the prefixes of chains that belong to one service port.
var servicePortPrefixes = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-", "KUBE-XLB-"}

// OfServicePort reports whether a chain belongs to one service port.
func OfServicePort(chain string) bool {
	return slices.ContainsFunc(servicePortPrefixes, func(prefix string) bool {
		return strings.HasPrefix(chain, prefix) && len(chain) == len(prefix)+16
	})
}

// Target returns the target of a rule: a chain, or a target without options.
func Target(rule string) string {
	words := strings.Fields(rule)
	if n := len(words); n > 1 && (words[n-2] == "-j" || words[n-2] == "-g") {
		return words[n-1]
	}
	return ""
}

// Contents returns the rules that tools save, by "table chain".
func Contents(t *testing.T, tools Tools, f proxier.Family) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, name := range []string{"nat", "filter", "mangle"} {
		table, err := tools.Save(t.Context(), f, name)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range table.Chains {
			all[name+" "+c.Name] = slices.Clone(c.Rules)
		}
	}
	return all
}

// Saved returns the rules that tools save, one per line. Rules of shared chains are sorted where
// their order does not matter.
func Saved(t *testing.T, tools Tools, f proxier.Family) string {
	t.Helper()
	all := Contents(t, tools, f)
	var b strings.Builder
	for _, at := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&b, "%s\n", at)
		rules := all[at]
		if SharedChainOf(at) != nil {
			tail := len(rules)
			for tail > 0 && isTail(rules[tail-1]) {
				tail--
			}
			slices.Sort(rules[:tail])
		}
		for _, r := range rules {
			fmt.Fprintf(&b, "  %s\n", r)
		}
	}
	return b.String()
}

func isTail(rule string) bool {
	return strings.Contains(rule, "this must be the last rule") || strings.Contains(rule, "unallocated ClusterIPs")
}

// Entries returns the rules of shared chains, whether the chains are split or not, and errors in the
// structure of split chains.
func Entries(t *testing.T, tools Tools, f proxier.Family) (list, wrong []string) {
	t.Helper()
	all := Contents(t, tools, f)
	for at, rules := range all {
		s := SharedChainOf(at)
		if s == nil {
			continue
		}
		_, chain, _ := strings.Cut(at, " ")
		root := s.Table + " " + s.Name
		reached := slices.ContainsFunc(all[root], func(r string) bool { return Target(r) == chain })
		if chain != s.Name && len(rules) > 0 && !reached {
			wrong = append(wrong, "nothing leads to "+at)
			continue
		}
		for _, r := range rules {
			if to := Target(r); chain != s.Name || !s.owns(to) {
				list = append(list, root+" "+r)
			}
		}
	}
	slices.Sort(list)
	return list, wrong
}
