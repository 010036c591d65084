// SPDX-License-Identifier: Apache-2.0

// Package conntrack lists, creates and deletes entries of the kernel's conntrack table
// through netlink, and applies its sysctls.
package conntrack
