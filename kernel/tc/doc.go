// SPDX-License-Identifier: Apache-2.0

// Package tc puts eBPF programs on network devices, by tcx (Linux 6.6) or as filters
// of a clsact qdisc before that. What it attaches stays when the process ends: no
// link and no pin holds it but the device itself. A later process finds it again
// by looking, and replaces it in place, so that no packet passes unseen.
//
// # Others on the same device
//
// Programs, filters and qdiscs of others are never changed. Ours come before them: a
// new tcx program becomes the first, and a filter has a low priority number. A program
// of ours says "next" (-1) of every packet that is not its own, so that the others
// see it too; behind a program that ends the chain instead ours would see nothing.
// All tcx programs run before all filters.
//
// # Changing the method
//
// Attach puts the program there by the new method before it takes the earlier one away
// from the old. In between both see each packet, the one of tcx first. Programs have to
// cope with that: a packet that one has translated is to mean nothing to the other.
//
// # Devices that vanish
//
// Everything returns ErrNoDevice for a device that is gone, and mostly that can be
// ignored. A device that moves to another network namespace takes a tcx program
// along, and loses its clsact qdisc.
//
// Everything acts in the network namespace of the calling thread. Whoever changes that
// of a thread has to lock it.
package tc
