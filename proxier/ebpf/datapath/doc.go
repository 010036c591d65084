// SPDX-License-Identifier: Apache-2.0

// Package datapath loads the eBPF programs and attaches them: to a cgroup for sockets, and
// to devices for packets. It finds those that an earlier process left.
package datapath
