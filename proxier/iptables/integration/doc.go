// SPDX-License-Identifier: Apache-2.0

// Package integration has the tests of the iptables tier that need root: scenarios on real
// traffic, rules in real tables by both variants of the tools, beside upstream's, and the
// benchmark of the tier on such tables.
package integration
