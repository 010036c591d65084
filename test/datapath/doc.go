// SPDX-License-Identifier: Apache-2.0

// Package datapath is a second opinion on the packet programs of the eBPF tier: what
// they have to do with a packet that comes in by an uplink or leaves by one. It is
// written from the statements about Services (docs/semantics.md) and from the RFCs,
// with lists where the programs have maps, and shares no code with them.
//
// Where the programs may choose, a backend or a source port, the model accepts
// whatever is eligible and holds them to it from then on.
package datapath
