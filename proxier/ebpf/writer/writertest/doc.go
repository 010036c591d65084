// SPDX-License-Identifier: Apache-2.0

// Package writertest helps tests of the writer: it has random Services and EndpointSlices, prints
// tables as text, and computes the expected text.
package writertest
