// SPDX-License-Identifier: Apache-2.0

// Package iptablestest has what tests of package iptables share: simulated programs of
// iptables that keep, print and refuse rules as the real ones do, a recorder around either
// kind, a node whose rules a tier writes, builders for its Services, and a view of the rules
// that are there. It knows the rules by their text alone, and needs no privileges.
package iptablestest
