// SPDX-License-Identifier: Apache-2.0

// Package flowtable is user space's side of the flows that packet programs track: it ends
// those that timed out, recovers ids, counts traffic, and copies flows between maps.
package flowtable
