// SPDX-License-Identifier: Apache-2.0

// Package sockets closes UDP sockets whose backends serve them no longer, and those that
// were connected before the programs were there.
package sockets
