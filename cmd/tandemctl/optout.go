// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
)

// optOut is one line of the list.
type optOut struct {
	Cookie uint64 `json:"cookie"`
	// PIDs of processes in the namespace, as far as this process sees them.
	PIDs []int `json:"pids"`
}

type optOutList struct {
	OptOuts []optOut `json:"optOuts"`
}

// optOutChange is what add and remove did.
type optOutChange struct {
	Cookie uint64 `json:"cookie"`
	Action string `json:"action"`
	// Changed is false where it was so already.
	Changed bool `json:"changed"`
}

func (a *app) optOutCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "optout",
		Short: "Leave the sockets of a network namespace alone",
		Long: `Sockets of a network namespace that is opted out are not translated: their
packets leave for the service address, for whoever wants to see them (a mesh,
a virtual machine's network, a debugger). They are translated by programs on
the host's end of the namespace's devices, which kube-proxy puts there about a
second later, if it runs, finds the namespace in /proc, and the kernel can
translate packets (see 'tandemctl status').

It takes effect with the next connect; connections that exist stay as they
are. It lasts until it is removed or the programs are, and outlives the
process, but not a reboot. When it is removed, connections that are
translated on a device are for another hour.`,
		Example: `  tandemctl optout add --pid 4711
  tandemctl optout list
  tandemctl optout remove --netns /run/netns/cni-0a1b2c`,
		Args: cobra.ArbitraryArgs,
		RunE: group,
	}
	c.AddCommand(
		&cobra.Command{
			Use:     "list",
			Short:   "List the network namespaces that are left alone",
			Example: "  tandemctl optout list -o json",
			Args:    args(cobra.NoArgs),
			RunE:    func(*cobra.Command, []string) error { return a.listOptOuts() },
		},
		a.optOutChangeCommand("add", "Leave a network namespace alone", func(i inspector, cookie uint64) (bool, error) {
			before, err := i.OptOuts()
			if err != nil {
				return false, err
			}
			return !slices.Contains(before, cookie), i.AddOptOut(cookie)
		}),
		a.optOutChangeCommand("remove", "Serve a network namespace again", func(i inspector, cookie uint64) (bool, error) {
			return i.RemoveOptOut(cookie)
		}),
	)
	return c
}

func (a *app) optOutChangeCommand(action, short string, change func(inspector, uint64) (bool, error)) *cobra.Command {
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
				return usagef("name one network namespace, by --netns, --pid or --cookie")
			case c.Flags().Changed("pid") && pid <= 0:
				return usagef("%d is no process id", pid)
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
				changed, err := change(i, cookie)
				if err != nil {
					return err
				}
				return a.showChange(optOutChange{Cookie: cookie, Action: action, Changed: changed})
			})
		},
	}
	c.Flags().StringVar(&netns, "netns", "", "path of the network namespace")
	c.Flags().IntVar(&pid, "pid", 0, "process in the network namespace")
	c.Flags().Uint64Var(&cookie, "cookie", 0, "cookie of the network namespace, as in the list")
	return c
}

func (a *app) showChange(c optOutChange) error {
	if a.output == "json" {
		return writeJSON(a.out, c)
	}
	text := map[string]string{"add": "is left alone", "remove": "is served"}[c.Action]
	if !c.Changed {
		text += ", as before"
	}
	_, err := fmt.Fprintf(a.out, "network namespace %d %s\n", c.Cookie, text)
	return err
}

func (a *app) listOptOuts() error {
	return a.withInspector(func(i inspector) error {
		cookies, err := i.OptOuts()
		if err != nil {
			return err
		}
		list := optOutList{OptOuts: []optOut{}}
		var owners map[uint64][]int
		if len(cookies) > 0 {
			owners = a.owners()
		}
		for _, cookie := range cookies {
			list.OptOuts = append(list.OptOuts, optOut{Cookie: cookie, PIDs: append([]int{}, owners[cookie]...)})
		}
		if a.output == "json" {
			return writeJSON(a.out, list)
		}
		return writeOptOuts(a.out, list)
	})
}

// netNSOwners finds the processes of each network namespace by its cookie. What
// cannot be asked is left out: a process may end at any time.
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
