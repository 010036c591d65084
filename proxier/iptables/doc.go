// SPDX-License-Identifier: Apache-2.0

// Package iptables is the datapath that every kernel has: decisions as netfilter rules, with
// the chain names and shapes of upstream's mode of that name.
//
//	PREROUTING, OUTPUT -> KUBE-SERVICES -> KUBE-SVC-…, KUBE-SVL-… -> KUBE-SEP-… (DNAT)
//	                                    -> KUBE-FW-… -> KUBE-EXT-… -> the same
//	                                    -> KUBE-NODEPORTS -> KUBE-EXT-…
//	POSTROUTING -> KUBE-POSTROUTING (masquerade)
//	INPUT -> KUBE-EXTERNAL-SERVICES, KUBE-PROXY-FIREWALL (refuse)
//	FORWARD, OUTPUT -> KUBE-SERVICES -> KUBE-EXTERNAL-SERVICES (refuse)
//	FORWARD, OUTPUT -> KUBE-PROXY-FIREWALL (refuse)
//
// Rules are a pure function of decisions, as iptables-save prints them, so that they can be
// compared with those in the kernel as text. A sync writes the chains that differ. Long
// shared chains are split into trees, so lookup and update cost does not grow with the
// number of Services.
package iptables
