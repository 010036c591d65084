// SPDX-License-Identifier: Apache-2.0

// Package netfilter is a fake of iptables and the kernel, for tests of code that writes
// rules: it accepts the input of iptables-restore, prints the output of iptables-save,
// and traces packets through the rules.
//
//	t := netfilter.New(proxier.IPv4)
//	err := t.Restore(rules)
//	result := t.Trace(netfilter.Packet{Src: client, Dst: vip, Protocol: proxier.TCP, In: "eth0"})
//	// result.Verdict, result.To, result.Masqueraded; result.Steps are the rules that matched
//
// NewCounters adds counters for -m nfacct, which Trace increments.
//
// It supports the options that a kube-proxy uses, and rejects all others, since ignoring
// them would hide errors. A rule is a list of matches and a target, each of which prints
// itself as both variants of the tools do. If the tools differ, or accept what can only
// be a mistake, the fake rejects it as well:
//
//   - policies for chains that are not built in, and DROP as one in table nat
//   - names of chains that begin with - or !
//   - negated matches of everything: ! -s 0.0.0.0/0, ! -i +, ! --dport 0:65535
//   - ports with a negated protocol: ! -p tcp -m tcp
//   - empty ranges of ports
//   - comments of more than 255 bytes, which the tools truncate
//   - unclosed quotes
//   - loops of chains that no packet reaches
//   - chains nested deeper than nftables allows
//   - -F and -X without a chain, which would change foreign chains
package netfilter
