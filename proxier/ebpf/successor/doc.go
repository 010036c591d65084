// SPDX-License-Identifier: Apache-2.0

// Package successor is the owner's side of map tdm_successor. With no process of this project
// running, the programs leave new connections to another kube-proxy that has held the ports
// of a kube-proxy for a while (bpf/successor.h). The owner says which ports these are, and
// that it is alive; the next one learns what happened, and takes back.
package successor
