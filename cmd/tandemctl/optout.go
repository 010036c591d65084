// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// optOut is one line of the list.
type optOut struct {
	Cookie uint64 `json:"cookie"`
	// By is what opted it out: a command, or a pod or its namespace.
	By string `json:"by"`
	// PIDs of processes in the namespace that are visible to this process.
	PIDs []int `json:"pids"`
}

type optOutList struct {
	OptOuts []optOut `json:"optOuts"`
}

// optOutChange is what add and remove did.
type optOutChange struct {
	Cookie uint64 `json:"cookie"`
	Action string `json:"action"`
	// Changed is false if there was nothing to do.
	Changed bool `json:"changed"`
	// Returns says that a pod or its namespace asked for the opt-out that was removed. While it does, a
	// running kube-proxy adds it again.
	Returns bool `json:"returns,omitempty"`
}

func (a *app) optOutCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "optout",
		Short: "Exclude network namespaces from socket load balancing",
		Long: `Connections of a network namespace that opted out are not load-balanced at the
socket: packets leave the namespace with the Service address, so that a mesh, the
network of a virtual machine or a debugger sees it. They are load-balanced by
packet instead, by programs on the host's end of the namespace's devices. A running
kube-proxy attaches these within about a second, if it finds the namespace in
/proc and the kernel can translate packets (see 'tandemctl status').

An opt-out applies to new connections; existing ones are not changed. It lasts
until it is removed, or the programs are: it survives a restart of kube-proxy, but
not a reboot. After its removal, connections that are load-balanced by packet are
served for another hour.

Pods opt out for good by the annotation tandem-proxy.dev/socket-lb=disabled, or by
this label of their namespace, where kube-proxy may read pods and namespaces. The
list shows what opted a network namespace out.`,
		Example: `  tandemctl optout add --pid 4711
  tandemctl optout list
  tandemctl optout remove --netns /run/netns/cni-0a1b2c`,
		Args: cobra.ArbitraryArgs,
		RunE: group,
	}
	c.AddCommand(
		a.optOutListCommand(),
		a.optOutChangeCommand("add", "Opt a network namespace out", func(i inspector, c *optOutChange, before lbmap.OptOutBy) error {
			c.Changed = before != lbmap.OptOutByCommand
			return i.AddOptOut(c.Cookie)
		}),
		a.optOutChangeCommand("remove", "Remove an opt-out", func(i inspector, c *optOutChange, before lbmap.OptOutBy) (err error) {
			c.Changed, err = i.RemoveOptOut(c.Cookie)
			c.Returns = c.Changed && before == lbmap.OptOutByPod
			return err
		}),
	)
	return c
}

func (a *app) optOutChangeCommand(action, short string, change func(inspector, *optOutChange, lbmap.OptOutBy) error) *cobra.Command {
	var netns string
	var pid int
	var cookie uint64
	c := &cobra.Command{
		Use:   action,
		Short: short,
		Example: fmt.Sprintf(`  tandemctl optout %[1]s --pid 4711
  tandemctl optout %[1]s --netns /proc/4711/ns/net`, action),
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			given := 0
			for _, flag := range []string{"netns", "pid", "cookie"} {
				if c.Flags().Changed(flag) {
					given++
				}
			}
			switch {
			case given != 1:
				return usagef("name one network namespace with --netns, --pid or --cookie")
			case c.Flags().Changed("pid") && pid <= 0:
				return usagef("%d is not a process id", pid)
			case c.Flags().Changed("cookie") && cookie == 0:
				return usagef("0 is not the cookie of a network namespace")
			case c.Flags().Changed("pid"):
				netns = fmt.Sprintf("/proc/%d/ns/net", pid)
			}
			if netns != "" {
				var err error
				if cookie, err = a.cookie(netns); err != nil {
					return err
				}
			}
			return a.withInspector(func(i inspector) error {
				before, err := i.OptOuts()
				if err != nil {
					return err
				}
				c := optOutChange{Cookie: cookie, Action: action}
				if err := change(i, &c, before[cookie]); err != nil {
					return err
				}
				return a.showChange(c)
			})
		},
	}
	c.Flags().StringVar(&netns, "netns", "", "path of the network namespace")
	c.Flags().IntVar(&pid, "pid", 0, "process in the network namespace")
	c.Flags().Uint64Var(&cookie, "cookie", 0, "cookie of the network namespace, as in the list")
	return c
}

func (a *app) showChange(c optOutChange) error {
	if a.isData() {
		return a.writeData("OptOutChange", c)
	}
	text := map[string]string{"add": "opted out", "remove": "has no opt-out"}[c.Action]
	if !c.Changed {
		text += " (no change)"
	}
	if c.Returns {
		text += "; a running kube-proxy adds it again while the pod or its namespace says " + proxier.KeySocketLB + "=" + proxier.SocketLBDisabled
	}
	_, err := fmt.Fprintf(a.out, "network namespace %d %s\n", c.Cookie, text)
	return err
}

func (a *app) optOutListCommand() *cobra.Command {
	var watch watchFlags
	c := &cobra.Command{
		Use:     "list",
		Short:   "List the network namespaces that opted out",
		Example: "  tandemctl optout list -o json\n  tandemctl optout list --watch",
		Args:    args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			return a.showList(c.Context(), &watch, listing{
				kind: "OptOutList", head: []string{"COOKIE", "BY", "PROCESSES"},
				look: func(context.Context) ([]watched, any, error) {
					list, err := a.listOptOuts()
					return watchedOptOuts(list), optOutList{list}, err
				},
			})
		},
	}
	watch.add(c.Flags())
	return c
}

func (a *app) listOptOuts() ([]optOut, error) {
	list := []optOut{}
	err := a.withInspector(func(i inspector) error {
		optOuts, err := i.OptOuts()
		if err != nil {
			return err
		}
		var owners map[uint64][]int
		if len(optOuts) > 0 {
			owners = a.owners()
		}
		for _, cookie := range slices.Sorted(maps.Keys(optOuts)) {
			list = append(list, optOut{Cookie: cookie, By: optOuts[cookie].String(), PIDs: append([]int{}, owners[cookie]...)})
		}
		return nil
	})
	return list, err
}

// watchedOptOuts are rows to watch. Processes come and go.
func watchedOptOuts(list []optOut) []watched {
	rows := make([]watched, len(list))
	for i := range list {
		o := &list[i]
		rows[i] = watched{key: number(o.Cookie), version: o.By, cells: []string{number(o.Cookie), o.By, pidsText(o.PIDs)}, object: o}
	}
	return rows
}

// netNSOwners finds the processes of each network namespace by its cookie. What
// cannot be read is left out: a process may end at any time.
func netNSOwners(proc string, cookieOf func(path string) (uint64, error)) map[uint64][]int {
	byLink := map[string][]int{}
	for _, name := range readDirNames(proc) {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if link, err := os.Readlink(filepath.Join(proc, name, "ns/net")); err == nil {
			byLink[link] = append(byLink[link], pid)
		}
	}
	owners := map[uint64][]int{}
	for _, pids := range byLink {
		slices.Sort(pids)
		for _, pid := range pids {
			if cookie, err := cookieOf(filepath.Join(proc, strconv.Itoa(pid), "ns/net")); err == nil {
				owners[cookie] = append(owners[cookie], pids...)
				break
			}
		}
	}
	return owners
}
