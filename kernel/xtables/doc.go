// SPDX-License-Identifier: Apache-2.0

// Package xtables runs the programs of iptables: restore to write rules, save to read
// them, and the plain command for single rules of others' chains.
//
// # Two variants
//
// There are two sets of programs under nearly the same names. That of nf_tables keeps
// rules in tables of nf_tables, the legacy one in tables of its own, and the kernel
// applies both to every packet. Everybody on a node has to use the same: a verdict in
// one says nothing to the other. Find tells which it is.
//
// # The lock
//
// The legacy kernel interface replaces whole tables, so two writers at once would undo
// each other's work. Its programs therefore wait for a lock on the file
// /run/xtables.lock, which in a container has to be the host's. Those of nf_tables
// have transactions instead; they take -w and neither wait nor open the file. Reading
// takes no lock in either.
//
// # What takes long
//
// Save of the nft variant (1.8.9) sorts chains in time that is quadratic when they
// were made in the order of their names: 1.1 s for 12,000 chains instead of 0.1 s. Let
// those who make thousands at once not sort them.
//
// # Where it acts
//
// Everything acts in the network namespace of the calling thread. Whoever changes that
// of a thread has to lock it. Nothing is kept between calls but where the programs are.
package xtables
