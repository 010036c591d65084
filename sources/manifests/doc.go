// SPDX-License-Identifier: Apache-2.0

// Package manifests feeds the change trackers from a directory of manifests in
// place of an API server: Services, EndpointSlices, ServiceCIDRs and the node's
// own Node, as YAML or JSON, watched for changes.
//
// Objects get the defaults the API server would give them, and those upstream's
// selectors would keep from a proxy are kept from it here. What is wrong with
// a file is reported and costs nothing else: its other documents are used, and
// what it provided before stays until the file is in order again. A file is
// best replaced by renaming a finished one over it.
//
// What is retained of an object is its name, the file it came from and a
// digest, never the object.
package manifests
