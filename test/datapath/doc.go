// SPDX-License-Identifier: Apache-2.0

// Package datapath is an independent model of the packet programs of the eBPF tier: how
// they must handle a packet that enters or leaves through an uplink. It is written from
// the statements about Services (docs/semantics.md) and from the RFCs. It uses lists
// where the programs have maps, and shares no code with them.
//
// If the programs can choose, a backend or a source port, the model accepts any eligible
// choice, and then expects them to keep it.
package datapath
