// SPDX-License-Identifier: Apache-2.0

// Package ebpf is the tier that serves frontends by eBPF programs. It says what happens in
// which order: open or adopt the maps, sync decisions into them, and drain when another
// proxy takes over. The work is done by the packages below it; see docs/architecture.md.
package ebpf
