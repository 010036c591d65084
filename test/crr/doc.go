// SPDX-License-Identifier: Apache-2.0

// Package crr measures the CPU time of a short connection through a Service: connect, one
// small request, its response, close. It compares variants: the pod itself, upstream's
// kube-proxy, and this one.
//
// Each variant has its own cluster in the lab, with the same Services, so that the rules of
// one do not slow down another. All clusters exist at the same time, and slices of a few
// hundred connections take turns, so that other load on the machine affects all variants
// alike. Ratios are computed within a turn.
//
// Client and server are two threads, pinned to one CPU, which is therefore never idle. The
// cost of a connection is their CPU time plus the softirqs that the kernel runs in their
// time and in its own thread. Work that the kernel does much later in workqueues, such as
// conntrack's garbage collection, does not count, and conntrack entries are deleted before
// each slice. Both favour proxies that need conntrack.
//
// The lab has veth pairs instead of network cards, and all hops of a connection are on one
// CPU, so hops that a proxy adds count in full.
package crr
