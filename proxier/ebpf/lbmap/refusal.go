// SPDX-License-Identifier: Apache-2.0

package lbmap

import "fmt"

// Refusal is the code in a service's entry for the reason of a refusal. All processes use the same
// codes.
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
