// SPDX-License-Identifier: Apache-2.0

// Package inspect is the read-only view of the maps and programs, for tandemctl. It works
// beside the process that writes them, and after its end.
package inspect
