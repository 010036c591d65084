// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
)

func (k FrontendKey) String() string {
	return fmt.Sprintf("%s/%s", ToAddrPort(k.Addr, k.Port), proxier.Protocol(k.Proto))
}

func (key RangeKey) String() string {
	bits := int(key.PrefixLen) - 32
	a := ToAddr(key.Addr)
	if a.Is4() {
		bits -= 96
	}
	return fmt.Sprintf("%s/%d", a, bits)
}

func (b Backend) String() string {
	return fmt.Sprintf("%s/%s", ToAddrPort(b.Addr, b.Port), proxier.Protocol(b.Proto))
}

// String is the name of the service port and its protocol.
func (e *Service) String() string {
	return string(e.Name[:min(int(e.NameLen), len(e.Name))]) + "/" + proxier.Protocol(e.Proto).String()
}
