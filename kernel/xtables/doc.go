// SPDX-License-Identifier: Apache-2.0

// Package xtables runs the iptables programs: restore writes rules, save reads them, and the plain
// command tells the version and whether a chain exists.
//
// # Two variants
//
// There are two sets of programs under nearly the same names. That of nf_tables keeps
// rules in tables of nf_tables, the legacy one in tables of its own, and the kernel
// applies both to every packet. All programs on a node have to use the same: a verdict in
// one has no effect on the other. Find returns the one that others use.
//
// # The lock
//
// The legacy kernel interface replaces whole tables, so two writers at once would undo
// each other's work. Its programs therefore wait for a lock on the file
// /run/xtables.lock, which in a container has to be the host's. Those of nf_tables
// have transactions instead; they take -w and neither wait nor open the file. Reading
// takes no lock in either.
//
// # Performance
//
// Save of the nft variant (1.8.9) sorts chains in time that is quadratic when they
// were created in the order of their names: 1.1 s for 12,000 chains instead of 0.1 s.
// Callers that create thousands at once should not sort them.
//
// # Network namespaces
//
// Everything acts in the network namespace of the calling thread. A caller that changes that
// of a thread has to lock it. Only the paths of the programs are kept between calls.
package xtables
