// SPDX-License-Identifier: Apache-2.0

// Package tc attaches eBPF programs to network devices: with tcx (Linux 6.6), or as
// filters of a clsact qdisc on older kernels. Attachments belong to the device, without a
// link or a pin, so they survive the process. A later process finds them on the device
// and replaces them in place, so that no packet bypasses the programs.
//
// # Foreign programs on the same device
//
// Foreign programs, filters and qdiscs are never changed. The proxy's programs run before
// them: a new tcx program becomes the first one, and a filter gets a low priority number.
// The proxy's programs return "next" (-1) for every packet that they do not handle, so
// the foreign programs see it too. After a foreign program that ends the chain, they
// would see nothing. All tcx programs run before all filters. Look finds foreign programs
// that were attached ahead later, and MoveFirst moves past them.
//
// # Changing the method
//
// Attach attaches the program by the new method before it detaches the old one. In
// between, both see each packet, the tcx program first. Programs must cope with that: one
// must ignore a packet that the other has translated.
//
// # Deleted devices
//
// All functions return ErrNoDevice for a device that does not exist, which callers can
// mostly ignore. A device that moves to another network namespace keeps its tcx programs
// and loses its clsact qdisc.
//
// All functions act in the network namespace of the calling thread. Callers that change
// the namespace of a thread must lock it.
package tc
