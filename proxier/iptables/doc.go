// SPDX-License-Identifier: Apache-2.0

// Package iptables is the tier that every kernel has: decisions as netfilter rules, with
// the chain names and shapes of upstream's mode of that name.
//
//	PREROUTING, OUTPUT -> KUBE-SERVICES -> KUBE-SVC-…, KUBE-SVL-… -> KUBE-SEP-… (DNAT)
//	                                    -> KUBE-FW-… -> KUBE-EXT-… -> the same
//	                                    -> KUBE-NODEPORTS -> KUBE-EXT-…
//	POSTROUTING -> KUBE-POSTROUTING (masquerade)
//	INPUT, FORWARD, OUTPUT -> KUBE-SERVICES, KUBE-EXTERNAL-SERVICES, KUBE-PROXY-FIREWALL (refuse)
//
// Rules are a pure function of decisions, in the very words of iptables-save, so that
// what is in the kernel is compared as text. A sync writes the chains that differ.
// Where many service ports share a chain it is a tree, so that neither a packet nor a
// change has to do with all of them.
package iptables
