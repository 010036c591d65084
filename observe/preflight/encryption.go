// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"fmt"
	"slices"
	"strings"
)

// encryption finds IPsec and WireGuard.
func encryption(f *Facts) (list []Finding) {
	if f.XfrmPolicies > 0 {
		list = append(list, Finding{
			Info, "encryption", fmt.Sprintf("IPsec: %d policies", f.XfrmPolicies),
			"In mode ebpf, rules serve clients outside on this node, if one of the policies encrypts or blocks packets that leave: programs would send such packets past the stack, and with it past IPsec. Connections of pods and of this host are not affected.", "",
		})
	}
	if names := f.ofType("wireguard"); len(names) > 0 {
		unserved := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return slices.Contains(f.Uplinks, n) })
		finding := Finding{
			Info, "encryption", "WireGuard: " + strings.Join(names, ", "),
			"Packets to endpoints behind it are sent through the device, and encrypted.", "",
		}
		if len(unserved) > 0 {
			finding.Severity = Remark
			finding.Means = "No traffic of this node was found to use " + strings.Join(unserved, ", ") + ", so programs do not serve clients that come in there."
			finding.Set = "If clients use Services through it, name it with the other devices in --ebpf-devices."
		}
		list = append(list, finding)
	}
	return list
}
