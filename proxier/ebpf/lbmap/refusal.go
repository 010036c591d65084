// SPDX-License-Identifier: Apache-2.0

package lbmap

import "fmt"

// Refusal is what a Service says of a refusal: the same numbers in
// every process.
type Refusal uint16

// String is the reason that tandemctl and explain show.
func (c Refusal) String() string {
	switch c {
	case RefusalFrontendsFull:
		return "frontends full"
	case RefusalServicesFull:
		return "services full"
	case RefusalBackendsFull:
		return "backends full"
	case RefusalSlotsFull:
		return "slots full"
	case RefusalSCTP:
		return "SCTP"
	case RefusalRangesFull:
		return "ranges full"
	}
	return fmt.Sprintf("reason %d", uint16(c))
}
