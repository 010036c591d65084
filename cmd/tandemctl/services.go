// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
)

func (a *app) servicesCommand() *cobra.Command {
	var namespace, server string
	var watch watchFlags
	c := &cobra.Command{
		Use:     "services [NAMESPACE/NAME[:PORT]]",
		Aliases: []string{"service", "svc"},
		Short:   "Show frontends, their backends and counters",
		Long: `Shows one frontend per line, with its service port and the datapath that serves
it. Frontends of the eBPF datapath are read from its maps, together with
connection counters since they were programmed. Counters are per service port, and
shown once for each.

Frontends of other datapaths, and the reason why eBPF does not serve them, are
requested from the kube-proxy of this node, at its metrics server.

With a Service or -o wide, a second table lists backends. A backend without a set
gets no new connections; it is kept for existing ones.

With --watch, changes follow the list: frontends that are new, that changed in
anything but their counters, and that ended.`,
		Example: `  tandemctl services
  tandemctl services -n kube-system -o wide
  tandemctl services kube-system/kube-dns
  tandemctl services -o json | jq '.elsewhere[], (.services[] | select(.state != "programmed"))'`,
		Args: args(cobra.MaximumNArgs(1)),
		RunE: func(c *cobra.Command, list []string) error {
			f, err := newServiceFilter(list, namespace)
			if err != nil {
				return err
			}
			if err := watch.check(); err != nil {
				return err
			}
			if watch.watch {
				return a.watchList(c.Context(), &watch, serviceHead[:len(serviceHead)-serviceCounters], func(ctx context.Context) ([]watched, error) {
					found, err := a.services(ctx, server, f)
					return watchedServices(&found), err
				})
			}
			found, err := a.services(c.Context(), server, f)
			if err != nil {
				return err
			}
			if f.name != "" && len(found.Services)+len(found.Elsewhere) == 0 {
				return f.missing(found)
			}
			if a.isData() {
				return a.writeData("ServiceList", found)
			}
			return writeServices(a.tables(), found, a.output == outputWide || f.name != "")
		},
	}
	c.ValidArgsFunction = a.completeServices
	c.Flags().StringVarP(&namespace, "namespace", "n", "", "only Services of this namespace")
	addAllNamespacesFlag(c)
	addServerFlag(c.Flags(), &server)
	watch.add(c.Flags())
	return c
}

// services reads the maps, and asks kube-proxy which datapath serves the rest. One of the
// two is enough.
func (a *app) services(ctx context.Context, server string, f serviceFilter) (found serviceList, err error) {
	found = serviceList{Services: []inspect.ServiceView{}, Elsewhere: []explain.Placement{}}
	inMaps := a.withInspector(func(i inspector) error {
		services, err := i.Services()
		found.Services = only(services, func(s *inspect.ServiceView) bool { return f.selects(s.Namespace, s.Name, s.Port) })
		found.Unplaced = i.Unplaced()
		return err
	})
	carriers, asked := askServer[explain.Placements](ctx, a, server, explain.PlacementsPath, nil)
	if asked != nil {
		found.ElsewhereError = asked.Error()
	} else {
		found.mode = carriers.Mode
		found.Elsewhere = only(carriers.Frontends, func(c *explain.Placement) bool { return f.selects(c.Namespace, c.Name, c.Port) })
	}
	var usage usageError
	switch {
	case errors.As(asked, &usage):
		return found, asked
	case inMaps != nil && (asked != nil || found.mode == string(capabilities.ModeEBPF) && !errors.Is(inMaps, inspect.ErrNotRunning) && !errors.Is(inMaps, capabilities.ErrNoCgroup2)):
		return found, inMaps // in other modes, the maps have nothing
	case asked != nil:
		fmt.Fprintf(a.err, "tandemctl: only frontends of the eBPF datapath are shown: %v\n", asked)
	}
	return found, nil
}

// serviceList is what the services command shows.
type serviceList struct {
	Services []inspect.ServiceView `json:"services"`
	// Unplaced counts all service ports over capacity. Those without a service id are not
	// among Services.
	Unplaced int `json:"unplaced"`
	// Elsewhere are frontends that the maps do not have, or not for all clients. ElsewhereError is why
	// they are not known, or empty.
	Elsewhere      []explain.Placement `json:"elsewhere"`
	ElsewhereError string              `json:"elsewhereError"`
	// mode of the kube-proxy that answered.
	mode string
}

// serviceFilter selects by namespace, name and port; empty means any.
type serviceFilter struct{ namespace, name, port string }

// newServiceFilter parses the argument: NAMESPACE/NAME, with the namespace flag
// also NAME, and either with :PORT, as logs write service ports.
func newServiceFilter(args []string, namespace string) (serviceFilter, error) {
	f := serviceFilter{namespace: namespace}
	if len(args) == 0 {
		return f, nil
	}
	name := args[0]
	if before, after, qualified := strings.Cut(name, "/"); qualified {
		if namespace != "" && namespace != before {
			return f, usagef("%s is not in namespace %s", name, namespace)
		}
		f.namespace, name = before, after
	}
	f.name, f.port, _ = strings.Cut(name, ":")
	if f.namespace == "" || f.name == "" || strings.Contains(f.name, "/") {
		return f, usagef("%q is not NAMESPACE/NAME", args[0])
	}
	return f, nil
}

func (f serviceFilter) selects(namespace, name, port string) bool {
	return (f.namespace == "" || f.namespace == namespace) && (f.name == "" || f.name == name) && (f.port == "" || f.port == port)
}

// only has the items to keep; it is never nil.
func only[T any](list []T, keep func(*T) bool) []T {
	kept := make([]T, 0, len(list))
	for i := range list {
		if keep(&list[i]) {
			kept = append(kept, list[i])
		}
	}
	return kept
}

func (f serviceFilter) missing(found serviceList) error {
	name := f.namespace + "/" + f.name
	if f.port != "" {
		name += ":" + f.port
	}
	text := "it does not exist or is headless"
	if found.ElsewhereError != "" {
		text += ", or another datapath serves it"
	}
	if found.Unplaced > 0 {
		text += fmt.Sprintf("; or it is one of the %d service ports over capacity (see 'tandemctl status')", found.Unplaced)
	}
	return fmt.Errorf("no Service %s: %s", name, text)
}

// serviceFlags select Services, for commands that also take one as their argument.
type serviceFlags struct{ service, namespace string }

// add adds the flags, and completes the argument. The usage says only, what, and which Services.
func (f *serviceFlags) add(a *app, c *cobra.Command, what string) {
	c.ValidArgsFunction = a.completeServices
	c.Flags().StringVarP(&f.namespace, "namespace", "n", "", "only "+what+"Services of this namespace")
	addAllNamespacesFlag(c)
	a.addServiceFlag(c, &f.service, "only "+what+"this Service, NAMESPACE/NAME[:PORT], as the argument")
}

func (f *serviceFlags) filter(args []string) (serviceFilter, error) {
	filter, err := newServiceFilter(args, f.namespace)
	if err != nil || f.service == "" {
		return filter, err
	}
	named, err := newServiceFilter([]string{f.service}, f.namespace)
	if err == nil && len(args) > 0 && named != filter {
		err = usagef("--service %s is not %s", f.service, args[0])
	}
	return named, err
}

// addServiceFlag adds a flag that completes names of Services.
func (a *app) addServiceFlag(c *cobra.Command, service *string, usage string) {
	c.Flags().StringVar(service, "service", "", usage)
	// It fails for a flag that is not there.
	_ = c.RegisterFlagCompletionFunc("service", func(c *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
		return a.completeServices(c, nil, begun)
	})
}

// addAllNamespacesFlag is for those who are used to kubectl: all namespaces are the default here.
func addAllNamespacesFlag(c *cobra.Command) {
	c.Flags().BoolP("all-namespaces", "A", false, "Services of all namespaces, which is the default")
	c.MarkFlagsMutuallyExclusive("namespace", "all-namespaces")
}

// completeServices completes the names of Services.
func (a *app) completeServices(c *cobra.Command, list []string, begun string) ([]string, cobra.ShellCompDirective) {
	if len(list) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	quiet := *a
	quiet.err = io.Discard
	found, err := quiet.services(c.Context(), "", serviceFilter{})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	names := map[string]bool{}
	for i := range found.Services {
		names[found.Services[i].Namespace+"/"+found.Services[i].Name] = true
	}
	for i := range found.Elsewhere {
		names[found.Elsewhere[i].Namespace+"/"+found.Elsewhere[i].Name] = true
	}
	var matching []string
	for name := range names {
		if strings.HasPrefix(name, begun) {
			matching = append(matching, name)
		}
	}
	slices.Sort(matching)
	return matching, cobra.ShellCompDirectiveNoFileComp
}
