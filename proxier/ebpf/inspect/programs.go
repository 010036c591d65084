// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
)

// WithPrograms calls fn with all programs of the proxy: on the cgroup, and on devices of this network namespace.
// They are closed afterwards.
func (i *Inspector) WithPrograms(fn func([]*ciliumebpf.Program) error) error {
	var programs []*ciliumebpf.Program
	for _, a := range i.attached {
		programs = append(programs, a.Program)
	}
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		for _, h := range datapath.PacketHooks {
			found, err := tc.Find(l.Attrs().Index, h.Direction, datapath.IsOwnProgram)
			if errors.Is(err, tc.ErrNoDevice) {
				continue
			}
			if err != nil {
				return err
			}
			defer tc.Close(found)
			for _, a := range found {
				programs = append(programs, a.Program)
			}
		}
	}
	return fn(programs)
}
