// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"fmt"
	"hash/fnv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// PutName writes what n.String would return and its length. Of a name that is
// too long, a hash takes the place of the end, so that it can still be told
// from others.
func PutName(to *[len(Service{}.Name)]uint8, n proxier.ServicePortName) uint8 {
	b := append(to[:0], n.Namespace...)
	b = append(append(b, '/'), n.Name...)
	if n.Port != "" {
		b = append(append(b, ':'), n.Port...)
	}
	if len(b) > len(to) { // b has left the array
		hash := fnv.New64a()
		hash.Write(b)
		end := fmt.Appendf(nil, "~%016x", hash.Sum64())
		keep := len(to) - len(end)
		copy(to[:], b[:keep])
		copy(to[keep:], end)
		return uint8(len(to))
	}
	return uint8(len(b))
}

// SplitName is the name that PutName wrote, in parts.
func (e *Service) SplitName() (namespace, name, port string) {
	namespace, name, _ = strings.Cut(string(e.Name[:min(int(e.NameLen), len(e.Name))]), "/")
	name, port, _ = strings.Cut(name, ":")
	return namespace, name, port
}
