// SPDX-License-Identifier: Apache-2.0

package ebpf

import "fmt"

// refusalCode is what a serviceEntry says of a refusal: the same numbers in
// every process.
type refusalCode uint16

func (c refusalCode) String() string {
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
