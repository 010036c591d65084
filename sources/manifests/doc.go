// SPDX-License-Identifier: Apache-2.0

// Package manifests reads objects from a directory of manifests, instead of an API server:
// Services, EndpointSlices, ServiceCIDRs and the node's own Node, as YAML or JSON. It watches
// the directory for changes.
//
// Objects get the defaults of the API server, and the selectors that upstream's kube-proxy
// uses apply. An invalid document is reported. The other documents of its file are used, and
// the objects that the file provided before stay until the file is valid again. To replace a
// file, rename a complete one over it.
//
// The package keeps the name, file and digest of each object, but not the object.
package manifests
