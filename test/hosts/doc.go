// SPDX-License-Identifier: Apache-2.0

// Package hosts proves the proxy on hosts as they are in clusters: with tunnels, several
// network cards, policy routing, firewalls, and pods that are attached in different ways.
//
// A Profile describes such a host as data: what iproute2, sysctl, iptables-restore and nft
// understand. Build makes it in the network namespaces of package lab: the node under test with
// its pods, a second node with remote pods, and clients outside the cluster. On each profile,
// the same Cells are played: who calls which kind of frontend, by which protocol and family,
// with endpoints on this or the other node, under which traffic policy.
//
// Netfilter is the control. A cell that it does not keep either belongs to Profile.Neither; a
// cell that it keeps and the proxy loses belongs to Profile.Lost. Both are exact: a cell that
// starts to work fails the test until its entry is removed. docs/hosts.md is generated from
// this data.
package hosts
