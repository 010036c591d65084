// SPDX-License-Identifier: Apache-2.0

// Package ebpf is the tier that carries frontends in eBPF programs. It writes
// the decisions it is given into BPF maps, and decides nothing itself.
package ebpf
