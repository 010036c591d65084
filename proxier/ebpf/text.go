// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
)

func frontendText(key frontendKey) string {
	return fmt.Sprintf("%s/%s", goAddrPort(key.Addr, key.Port), proxier.Protocol(key.Proto))
}

func rangeText(key rangeKey) string {
	bits := int(key.PrefixLen) - 32
	a := goAddr(key.Addr)
	if a.Is4() {
		bits -= 96
	}
	return fmt.Sprintf("%s/%d", a, bits)
}
