// SPDX-License-Identifier: Apache-2.0

// Package rules measures the time and resources for writing netfilter rules, of this proxy's
// mode iptables and of upstream's: the same objects and the same fake API server, each in a
// process of its own on a node of its own.
package rules
