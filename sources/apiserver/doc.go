// SPDX-License-Identifier: Apache-2.0

// Package informers feeds the change trackers from the API server: it lists
// and watches Services, EndpointSlices, ServiceCIDRs and the node's own Node,
// keeps of each object only what a proxy reads, and hands the changes to a
// proxier.Handler.
//
// It needs list and watch on services, endpointslices.discovery.k8s.io and
// nodes, and uses them on servicecidrs.networking.k8s.io where it has them. When the API server goes away the last state stays
// in force for as long as it takes; only the log tells.
package apiserver
