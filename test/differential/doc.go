// SPDX-License-Identifier: Apache-2.0

// Package differential asks upstream's iptables proxier about random clusters, and compares
// what it does with packets with the oracle's answer. Differences that are meant are listed
// in deliberate.go; any other one is an error.
//
// hack/upstream.sh -tracer builds upstream's side: a program of upstream's own tests, with a
// proxier of each family, fake tables, and their packet tracer. Its rules are traced a second
// time by package netfilter, which also knows of hooks, devices, probabilities and the lists
// of session affinity. Where upstream's tracer can tell, both have to agree.
package differential
