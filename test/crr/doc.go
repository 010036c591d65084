// SPDX-License-Identifier: Apache-2.0

// Package crr measures what a short connection through a Service costs in CPU
// time: connect, one small request, its response, close. It puts variants side
// by side: the pod itself, upstream's kube-proxy, and ours.
//
// Each variant has a cluster of its own in the lab, with the same Services, so that
// the rules of one do not burden another. All are alive at the same time, and slices
// of a few hundred connections take turns: what the machine does meanwhile
// hits all alike. Ratios are within a turn.
//
// Client and server are two threads, pinned to one CPU, which therefore never
// waits: what they use, together with the softirqs that the kernel runs on their time
// and in its own thread, is all that a connection costs. Not counted is what the
// kernel does much later in workqueues, such as conntrack's garbage collection, and
// tracked connections are forgotten before each slice: both are in favour of proxies
// that need conntrack.
//
// The machine is the lab's: veth pairs instead of network cards, all hops of a
// connection on one CPU. Hops that a proxy adds therefore count in full.
package crr
