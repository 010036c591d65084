// SPDX-License-Identifier: Apache-2.0

// Package netfilter is a stand-in for iptables and the kernel behind it, for tests
// of what writes rules: it takes the text that iptables-restore takes, prints what
// iptables-save prints, and traces packets through the rules.
//
//	t := netfilter.New(proxier.IPv4)
//	err := t.Restore(rules)
//	result := t.Trace(netfilter.Packet{Src: client, Dst: vip, Protocol: proxier.TCP, In: "eth0"})
//	// result.Verdict, result.To, result.Masqueraded; result.Steps say how it came about
//
// NewCounters adds the counters that rules name by -m nfacct, which Trace counts in.
//
// It knows the words that a kube-proxy uses, and refuses all others: what a test
// does not understand it must not pass over. A rule is a list of matches and a target,
// each of which prints itself as both variants of the tools do. Where the tools
// differ, or take what can only be a mistake, the stand-in refuses as well:
//
//   - policies for chains that are not built in, and DROP as one in table nat
//   - names of chains that begin with - or !
//   - negated matches of everything: ! -s 0.0.0.0/0, ! -i +, ! --dport 0:65535
//   - ports where the protocol is only said not to be another: ! -p tcp -m tcp
//   - ranges of ports that are empty
//   - comments of more than 255 bytes, which the tools cut
//   - quotes that are not closed
//   - loops of chains that no packet reaches
//   - chains nested deeper than nftables allows
//   - -F and -X without a chain, which would change foreign chains
package netfilter
