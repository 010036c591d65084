// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package vm runs a program, most often a test binary, under another Linux kernel:
// Debian's, in a virtual machine that QEMU emulates, so that neither root nor
// hardware support is needed. A machine boots in seconds, runs one command and ends.
//
//	go test -p 1 -exec "vmrun -kernel 6.1 --" ./tc
//
// The host's side fetches kernels and the guest's programs with a private state of
// apt, keeps them as cpio archives in the user's cache, and gives QEMU an initramfs
// of those and of the job: the command, the module it was called in, and what to run.
// There is no disk and no network.
//
// The guest's side is the same binary, as process 1: it makes the mounts tests need, runs
// the command and sends its output, the files it wrote and its exit code over serial
// lines. Modules are loaded as on any machine, when the kernel and its tools ask for them,
// so that no list of them is kept here.
package vm
