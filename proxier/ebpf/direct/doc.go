// SPDX-License-Identifier: Apache-2.0

// Package direct finds out which backends on other nodes can be reached by direct server return: whether their nodes run
// programs that take packets in the form in which this node sends them. It asks them by such a packet with an echo request,
// which those programs answer. Nothing else does: a node without them passes the packet on to the backend, whose system
// drops it, or answers what has an IP option by another number. So no other kube-proxy, no earlier version and no network that drops such packets gets any of them from a client.
package direct
