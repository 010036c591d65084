// SPDX-License-Identifier: Apache-2.0

package lbmap

// Dispatch is in what form packets of direct server return are sent to other nodes: DispatchIPIP, DispatchGeneve or DispatchOpt.
type Dispatch uint8
