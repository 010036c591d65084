// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// detached is what the command did.
type detached struct {
	Programs []string `json:"programs"`
}

func (a *app) detachCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "detach",
		Short: "Detach the eBPF programs, and nothing else",
		Long: `Detaches the eBPF programs of Tandem from the cgroup and from all devices. Their maps
go with them. Rules and virtual servers of any kube-proxy stay, so Services are
served if another kube-proxy or another mode serves them; otherwise they are down.
Connections from outside that the programs translate break. Nothing is detached
while a kube-proxy in mode ebpf runs on this node.

To remove rules and virtual servers as well, stop kube-proxy and run
'kube-proxy --cleanup'.`,
		Example: `  tandemctl detach
  tandemctl detach -o json`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := a.root()
			if err != nil {
				return err
			}
			removed, err := a.detach(cmd.Context(), root)
			if err != nil {
				return err
			}
			if a.isData() {
				return a.writeData("Detached", detached{append([]string{}, removed...)})
			}
			if len(removed) == 0 {
				_, err = fmt.Fprintln(a.out, "No program of Tandem is attached.")
			} else {
				_, err = fmt.Fprintf(a.out, "Detached %d programs: %s\n", len(removed), strings.Join(removed, ", "))
			}
			return err
		},
	}
}
