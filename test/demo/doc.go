// SPDX-License-Identifier: Apache-2.0

// Command demo shows the real kube-proxy binary at work without a cluster: two
// nodes and a few pods in network namespaces of this machine, manifests in a
// directory in place of an API server, and traffic that is counted while endpoints
// come and go and the process is killed. It ends with an error if a single
// request failed that should not have, so it serves as a test as well.
//
// Everything it makes is gone when it ends, also on Ctrl-C.
package main
