// SPDX-License-Identifier: Apache-2.0

// Package image builds container images without a daemon: their parts, archives that every registry tool reads, and what is in them (SBOM). From
// the same parts comes the same digest, on any machine.
package image
