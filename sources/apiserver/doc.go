// SPDX-License-Identifier: Apache-2.0

// Package apiserver reads objects from the API server. It lists and watches Services,
// EndpointSlices, ServiceCIDRs and the node's own Node, drops the fields that a proxy does
// not read, and passes changes to a proxier.Handler.
//
// It requires list and watch on services, endpointslices.discovery.k8s.io and nodes, and uses
// servicecidrs.networking.k8s.io if allowed. While the API server is unavailable, the last
// state stays in force, and the package logs the failure.
package apiserver
