// SPDX-License-Identifier: Apache-2.0

// Package probepacket has the packets by which a node tries its own packet programs: those that a client outside would send first. The kernel
// runs a loaded program on such a packet (BPF_PROG_TEST_RUN) and returns what became of it; nothing is sent.
package probepacket
