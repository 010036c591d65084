// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/attached"
)

// programs finds BPF programs of others, but for those of plugins that have a finding of their own.
func programs(f *Facts) (list []Finding) {
	var sockets, devices []string
	for _, p := range f.Programs {
		if strings.HasPrefix(p.Name, ownPrefix) || strings.HasPrefix(p.Name, "cil_") || strings.HasPrefix(p.Name, "cali_") {
			continue
		}
		switch {
		case p.Cgroup != "":
			sockets = append(sockets, programText(&p))
		case slices.Contains(f.Uplinks, p.Device):
			devices = append(devices, programText(&p))
		}
	}
	if len(sockets) > 0 {
		list = append(list, Finding{
			Remark, "programs", "programs of others on cgroups: " + some(sockets),
			"They see or change the addresses of connections, before or after Tandem's programs at the same hooks.",
			"Find out whose they are (bpftool prog show id ID), and whether they balance Services.",
		})
	}
	if len(devices) > 0 {
		list = append(list, Finding{
			Remark, "programs", "programs of others on uplinks: " + some(devices),
			"They see packets of clients outside before or after Tandem's programs. XDP programs come before. One that redirects or drops packets hides them from the rest.",
			"Find out whose they are (bpftool prog show id ID), and try Services from outside.",
		})
	}
	return list
}

func programText(p *attached.Program) string {
	name := p.Name
	if name == "" {
		name = "unnamed"
	}
	return fmt.Sprintf("%s (%d, %s %s)", name, p.ID, p.Hook, p.Cgroup+p.Device)
}

// some shows the first few of a list.
func some(list []string) string {
	const shown = 4
	if more := len(list) - shown; more > 0 {
		return strings.Join(list[:shown], ", ") + fmt.Sprintf(" and %d more", more)
	}
	return strings.Join(list, ", ")
}
