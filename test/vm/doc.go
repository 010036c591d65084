// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package vm runs a program, most often a test binary, under another Linux kernel:
// Debian's, in a virtual machine that QEMU emulates, so that neither root nor
// hardware support is needed. A machine boots in seconds, runs one command and ends.
//
//	go test -p 1 -exec "vmrun -kernel 6.1 --" ./kernel/tc
//
// The host side downloads kernels and the guest's programs with a private apt state, keeps
// them as cpio archives in the user's cache, and gives QEMU an initramfs of these and of the
// job: the command, its binary, and the Go module it was called in. There is no disk and no
// network.
//
// The guest side is the same binary as process 1. It makes the mounts that tests need, runs
// the command and sends its output, the files it wrote and its exit code over serial lines.
// The kernel and its tools load modules on demand, as on any machine, so no list of them is
// needed.
package vm
