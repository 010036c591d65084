// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
)

func (k frontendKey) String() string {
	return fmt.Sprintf("%s/%s", goAddrPort(k.Addr, k.Port), proxier.Protocol(k.Proto))
}

func (key rangeKey) String() string {
	bits := int(key.PrefixLen) - 32
	a := goAddr(key.Addr)
	if a.Is4() {
		bits -= 96
	}
	return fmt.Sprintf("%s/%d", a, bits)
}

func (b backendEntry) String() string {
	return fmt.Sprintf("%s/%s", goAddrPort(b.Addr, b.Port), proxier.Protocol(b.Proto))
}

// String is the name of the service port and its protocol.
func (e *serviceEntry) String() string {
	return string(e.Name[:min(int(e.NameLen), len(e.Name))]) + "/" + proxier.Protocol(e.Proto).String()
}
