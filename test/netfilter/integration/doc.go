// SPDX-License-Identifier: Apache-2.0

// Package integration compares package netfilter with the real tools and kernel, which needs
// root: what they print and reject, and which rules packets match. It also checks that the
// rules of upstream in testdata are those that upstream writes.
package integration
