// SPDX-License-Identifier: Apache-2.0

// Package writertest helps tests of what is written into the maps: random Services and
// EndpointSlices, the tables as text, and what they should say.
package writertest
