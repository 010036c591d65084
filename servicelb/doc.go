// SPDX-License-Identifier: Apache-2.0

// Package servicelb gives Services of type LoadBalancer the addresses of nodes, as the ServiceLB of K3s does by a DaemonSet of
// klipper-lb for each Service, but without pods: the node proxies serve the addresses in the status of a Service anyway. What
// the pods did besides is decided here: which nodes are fit, and who gets a port that several Services want, or that a process of the
// host has. Decide is a pure function of the objects; package controller watches them and writes the status.
package servicelb
