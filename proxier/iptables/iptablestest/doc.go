// SPDX-License-Identifier: Apache-2.0

// Package iptablestest has what tests of package iptables share: simulated iptables programs that
// keep, print and refuse rules as the real ones do; a recorder around simulated or real programs; a
// node whose rules a tier writes; builders for its Services; and views of the existing rules. It
// knows rules by their text only, and needs no privileges.
package iptablestest
