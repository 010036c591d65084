// SPDX-License-Identifier: Apache-2.0

// Package lbmap has the eBPF maps: their types and constants, generated from the C headers
// of bpf/, the interfaces to them, a fake that behaves as the kernel's maps do, and the
// programs in this binary that use them. It decides nothing.
package lbmap
