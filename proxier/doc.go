// SPDX-License-Identifier: Apache-2.0

// Package proxier turns Kubernetes objects into decisions about Services.
//
// Sources call the event handlers; one change tracker collapses bursts; the
// decision table works out, once for every tier, which address and port is
// served by which backends. A tier (proxier/ebpf, …) writes those decisions
// down in its kernel's language and decides nothing itself. This package
// imports no tier and no kernel library.
package proxier
