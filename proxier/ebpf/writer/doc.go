// SPDX-License-Identifier: Apache-2.0

// Package writer writes decisions into the maps: it gives out ids and slots, orders the
// writes so that programs never see half of a change, and refuses what does not fit.
package writer
