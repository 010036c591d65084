// SPDX-License-Identifier: Apache-2.0

// Package staleudp deletes stale UDP entries from the kernel's conntrack.
//
// Netfilter decides about the first packet of a connection only. Later packets follow the
// conntrack entry. A TCP connection ends, and its entry with it. A UDP client that keeps
// sending from one port keeps its entry, and so its backend, indefinitely: even a backend
// that was removed, or no backend at all if the client started before there was one. The
// entries that the current rules would not create have to be deleted, and no others:
//
//	reconciler.Observe(&update)                       // each update, as the tier gets it
//	deleted, err := reconciler.Reconcile(ctx, family) // after its rules are written
//
// Only UDP entries of zone 0 are looked at, and of those only the ones to a frontend that a
// decision has, or had. TCP and SCTP entries stay, so that those connections can close
// gracefully. The exception are TCP connections to a frontend that began before there was a proxy,
// as after a cleanup: they were not translated, and not answered. They are deleted once, at the
// start.
package staleudp
