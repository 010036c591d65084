// SPDX-License-Identifier: Apache-2.0

// Package rules measures what it takes to have netfilter rules written, for our
// iptables tier and for upstream's mode of that name: the same objects, the same fake
// API server, each in a process of its own on a node of its own.
package rules
