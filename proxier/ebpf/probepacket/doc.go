// SPDX-License-Identifier: Apache-2.0

// Package probepacket builds the packets with which a node probes its own packet programs: the first packet of a client outside. The kernel
// runs a loaded program on it (BPF_PROG_TEST_RUN), and returns the verdict and the packet after the program. Nothing is sent.
package probepacket
