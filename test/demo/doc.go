// SPDX-License-Identifier: Apache-2.0

// Command demo runs the real kube-proxy binary without a cluster: two nodes and a few pods
// in network namespaces of this machine, and a directory of manifests instead of an API
// server. It counts requests while endpoints are added and removed and the process is
// killed. It fails if a single request fails that should not, so it is also a test.
//
// It removes everything that it created when it ends, also on Ctrl-C.
package main
