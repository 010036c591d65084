// SPDX-License-Identifier: Apache-2.0

// Package conntrack removes from the kernel's conntrack what it remembers of UDP
// Services that are another way by now.
//
// Where netfilter translates, it decides about the first packet of a connection
// alone; all later ones follow the entry that conntrack has. A TCP connection
// ends, and with it the entry. A client of UDP that keeps sending from one port
// keeps its entry, and so its backend, for ever: also one that is gone, or none at
// all if it began before there was one. So the entries that rules would not make
// any more have to go, and no others:
//
//	reconciler.Observe(&update)                       // each one, as the tier gets it
//	deleted, err := reconciler.Reconcile(ctx, family) // after its rules are written
//
// Only UDP entries of zone 0 are ever looked at, and of those only what goes to a
// frontend that a decision has, or had. Entries of TCP and SCTP stay, whatever
// becomes of their backends, as those connections can close gracefully.
//
// Settings are those of the kernel's conntrack as a whole, for everybody's flows.
package conntrack
