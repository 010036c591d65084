// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/backendstates"
)

// backendFlags are those of the commands that change the state of backends.
type backendFlags struct {
	service, directory, server string
	lasts                      time.Duration
	confirm                    time.Duration // how long kube-proxy may take
}

// backendChange is what drain, quarantine and restore did.
type backendChange struct {
	Backend string               `json:"backend"`
	Service string               `json:"service,omitempty"`
	State   proxier.BackendState `json:"state"`
	Until   time.Time            `json:"until,omitzero"`
	// InForce says that a running kube-proxy has confirmed it.
	InForce bool `json:"inForce"`
	// ServicePorts have the backend; they are not known if it is not in force.
	ServicePorts []explain.BackendUse `json:"servicePorts"`
}

// backendList is what list shows.
type backendList struct {
	Backends []backendLine `json:"backends"`
}

type backendLine struct {
	backendstates.Entry
	// InForce is null if no kube-proxy answered.
	InForce *bool `json:"inForce"`
	// Elsewhere says that kube-proxy has it from another directory.
	Elsewhere bool `json:"elsewhere,omitempty"`
}

func (a *app) backendCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "backend",
		Short: "Drain, quarantine and restore backends on this node",
		Long: `Takes a backend of Services out of service for the clients of this node. Other
nodes are not concerned, and nothing changes in the API.

A drained backend gets no new connections. If all backends of a Service are
drained, its new connections are refused. A quarantined backend gets none while
another one takes them. Existing connections stay in both states, and the health
checks of load balancers do not count the backend.

The states are kept in a file, and outlive a restart of kube-proxy. They outlive
its container if the directory is one of the host: the chart has it mounted, and
kubeadm's DaemonSet does not. A reboot ends them, unless the directory is on a disk.`,
		Example: `  tandemctl backend drain 10.244.1.7
  tandemctl backend quarantine 10.244.1.7:8080 --service shop/web --for 10m
  tandemctl backend list
  tandemctl backend restore 10.244.1.7`,
		Args: cobra.ArbitraryArgs,
		RunE: group,
	}
	c.AddCommand(
		a.backendChangeCommand("drain", "Give a backend no new connections", proxier.MaintenanceState),
		a.backendChangeCommand("quarantine", "Give a backend no new connections while another one takes them", proxier.QuarantinedState),
		a.backendChangeCommand("restore", "Give a drained or quarantined backend new connections again", proxier.ActiveState),
		a.backendListCommand(),
	)
	return c
}

func (f *backendFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&f.directory, "state-dir", "", "directory of the states (default: that of the running kube-proxy, or "+config.DefaultStateDirectory+")")
	addServerFlag(c.Flags(), &f.server)
}

func (a *app) backendChangeCommand(action, short string, state proxier.BackendState) *cobra.Command {
	var f backendFlags
	c := &cobra.Command{
		Use:     action + " ADDR[:PORT]",
		Short:   short,
		Example: fmt.Sprintf("  tandemctl backend %[1]s 10.244.1.7\n  tandemctl backend %[1]s '[fd00:10:244:1::7]:8080' --service shop/web", action),
		Args:    args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, list []string) error {
			b, err := explain.ParseBackend(list[0], f.service)
			switch {
			case err != nil:
				return usageError{err}
			case c.Flags().Changed("for") && f.lasts <= 0:
				return usagef("--for %s: want a duration greater than 0, 10m", f.lasts)
			}
			now := a.now().UTC()
			e := backendstates.Entry{Address: b.Addr, Port: b.Port, Service: f.service, State: state, Since: now.Truncate(time.Second)}
			if f.lasts > 0 {
				e.Until = now.Add(f.lasts)
			}
			change, err := a.changeBackend(c.Context(), &f, e)
			if err != nil {
				return err
			}
			if a.isData() {
				return a.writeData("BackendChange", change)
			}
			return a.writeBackendChange(change)
		},
	}
	c.Flags().DurationVar(&f.confirm, "timeout", confirmLimit, "how long to wait until kube-proxy has applied it; it notices at once, or within 10s where it cannot watch the directory")
	a.addServiceFlag(c, &f.service, "only for this Service, NAMESPACE/NAME (default: for all)")
	if state != proxier.ActiveState {
		c.Flags().DurationVar(&f.lasts, "for", 0, "restore it after this time (default: never)")
	}
	f.add(c)
	return c
}

// askBackends asks the running kube-proxy about states, and about a backend if there is one. The answer is nil if
// none runs, or one has just started. With an error the directory is that by default.
func (a *app) askBackends(ctx context.Context, f *backendFlags, e *backendstates.Entry) (*explain.Backends, error) {
	query := url.Values{}
	if e != nil {
		query.Set(explain.ParamBackend, e.Backend())
		query.Set(explain.ParamService, e.Service)
	}
	answer, err := askServer[explain.Backends](ctx, a, f.server, explain.BackendsPath, query)
	_, starting := errors.AsType[errNotReady](err)
	switch {
	case starting && f.directory == "":
		err = fmt.Errorf("%w; wait, or pass its --state-dir", err)
	case starting, errors.Is(err, errNoServer) && f.server == "":
		answer, err = nil, nil
	case errors.Is(err, errNoServer):
		err = fmt.Errorf("%v; without --server, the file is written for the next kube-proxy", err) // not %w: the advice is that for other commands
	}
	if f.directory == "" {
		f.directory = config.DefaultStateDirectory
		if answer != nil {
			f.directory = answer.StateDirectory
		}
	}
	return answer, err
}

// changeBackend writes the file and waits until the running kube-proxy confirms it.
func (a *app) changeBackend(ctx context.Context, f *backendFlags, e backendstates.Entry) (*backendChange, error) {
	answer, err := a.askBackends(ctx, f, &e)
	if err != nil {
		return nil, err
	}
	c := &backendChange{Backend: e.Backend(), Service: e.Service, State: e.State, Until: e.Until, ServicePorts: []explain.BackendUse{}}
	if e.State == proxier.ActiveState {
		found, err := backendstates.Remove(f.directory, e, a.now())
		if err != nil {
			return nil, fmt.Errorf("restore the backend: %v", err) // not %w: the advice about permissions is for BPF
		}
		switch inForce := answer != nil && !isInForce(answer, &e); {
		case !found && inForce:
			return nil, fmt.Errorf("kube-proxy has the state of backend %s%s from another directory than %s: if it runs in a container, run tandemctl there (kubectl exec)", e.Backend(), ofService(e.Service), f.directory)
		case !found:
			return nil, fmt.Errorf("%s has no state of backend %s%s; 'tandemctl backend list' shows what there is", filepath.Join(f.directory, backendstates.FileName), e.Backend(), ofService(e.Service))
		}
	} else {
		if answer != nil && len(answer.Found) == 0 {
			return nil, fmt.Errorf("no Service port of this node has a backend %s%s", e.Backend(), ofService(e.Service))
		}
		if err := backendstates.Set(f.directory, e, a.now()); err != nil {
			return nil, fmt.Errorf("keep the state of the backend: %v", err) // as above
		}
	}
	if answer == nil {
		return c, nil
	}
	for start := time.Now(); !isInForce(answer, &e); {
		if !e.Until.IsZero() && a.now().After(e.Until) {
			return nil, errors.New("the state expired before kube-proxy applied it (mode iptables: --iptables-min-sync-period)")
		}
		if time.Since(start) > f.confirm {
			rest := "The file keeps the state until 'tandemctl backend restore' here"
			if e.State == proxier.ActiveState {
				rest = "The state is removed from the file"
			}
			return nil, fmt.Errorf("kube-proxy has not taken over %s after %s: if it runs in a container, run tandemctl there (kubectl exec), or mount that directory of the host. %s",
				filepath.Join(f.directory, backendstates.FileName), f.confirm, rest)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(confirmInterval):
		}
		if answer, err = a.askBackends(ctx, f, &e); err != nil {
			return nil, err
		}
		if answer == nil {
			return c, nil // it has just ended
		}
	}
	c.InForce, c.ServicePorts = true, answer.Found
	return c, nil
}

const (
	confirmLimit    = 15 * time.Second
	confirmInterval = 20 * time.Millisecond
)

// isInForce reports whether kube-proxy has taken a state over, or its end.
func isInForce(answer *explain.Backends, e *backendstates.Entry) bool {
	i := slices.IndexFunc(answer.States, func(s explain.BackendState) bool {
		return s.Address == e.Address && s.Port == e.Port && s.Service == e.Service
	})
	if e.State == proxier.ActiveState {
		return i < 0
	}
	return i >= 0 && answer.States[i].State == e.State && answer.States[i].Until.Equal(e.Until)
}

func ofService(name string) string {
	if name == "" {
		return ""
	}
	return " of Service " + name
}

func (a *app) writeBackendChange(c *backendChange) error {
	text := map[proxier.BackendState]string{
		proxier.MaintenanceState: "drained", proxier.QuarantinedState: "quarantined", proxier.ActiveState: "restored",
	}[c.State]
	if !c.Until.IsZero() {
		text += fmt.Sprintf(" until %s (for %s)", c.Until.Format(time.RFC3339), c.Until.Sub(a.now()).Round(time.Second))
	}
	if !c.InForce {
		text += "; no kube-proxy serves on this node yet; it takes effect once one does"
	}
	fmt.Fprintf(a.out, "backend %s%s %s\n", c.Backend, ofService(c.Service), text)
	if len(c.ServicePorts) == 0 {
		return nil
	}
	fmt.Fprintln(a.out)
	t := newTable(a.tables(), "SERVICE PORT", "PROTOCOL", "BACKEND", "NEW CONNECTIONS", "OTHERS THAT TAKE THEM")
	for _, u := range c.ServicePorts {
		name := u.Namespace + "/" + u.Name
		if u.Port != "" {
			name += ":" + u.Port
		}
		takes := "no: " + u.Cluster
		if u.Eligible {
			takes = "yes: " + u.Cluster
		}
		t.row(name, u.Protocol, u.Address.String(), takes, strconv.Itoa(u.Others))
	}
	return t.flush()
}

func (a *app) backendListCommand() *cobra.Command {
	var f backendFlags
	var watch watchFlags
	c := &cobra.Command{
		Use:     "list",
		Short:   "List the backends that are drained or quarantined on this node",
		Example: "  tandemctl backend list -o json\n  tandemctl backend list --watch",
		Args:    args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			told := ""
			return a.showList(c.Context(), &watch, listing{
				kind: "BackendList", head: []string{"BACKEND", "SERVICE", "STATE", "SINCE", "UNTIL", "IN FORCE"},
				none: "No backend is drained or quarantined on this node.",
				look: func(ctx context.Context) ([]watched, any, error) {
					list, unknown, err := a.listBackends(ctx, f)
					if unknown != told { // said once, not with every look
						told = unknown
						io.WriteString(a.err, unknown)
					}
					return watchedBackends(list), backendList{list}, err
				},
			})
		},
	}
	f.add(c)
	watch.add(c.Flags())
	return c
}

// listBackends are those of the file, and those that kube-proxy has besides; unknown says why the latter are not known.
func (a *app) listBackends(ctx context.Context, f backendFlags) (list []backendLine, unknown string, err error) {
	answer, err := a.askBackends(ctx, &f, nil)
	if _, usage := errors.AsType[usageError](err); usage {
		return nil, "", err
	}
	if err != nil {
		unknown = fmt.Sprintf("tandemctl: whether they are in force is not known: %v\n", err)
	}
	entries, err := backendstates.Load(f.directory, a.now())
	if err != nil {
		return nil, unknown, err
	}
	list = []backendLine{}
	for _, e := range entries {
		line := backendLine{Entry: e}
		if answer != nil {
			inForce := isInForce(answer, &e)
			line.InForce = &inForce
		}
		list = append(list, line)
	}
	if answer != nil {
		list = append(list, elsewhere(entries, answer.States)...)
	}
	return list, unknown, nil
}

// elsewhere are the states in force that no entry is about.
func elsewhere(entries []backendstates.Entry, inForce []explain.BackendState) (list []backendLine) {
	yes := true
	for _, s := range inForce {
		e := backendstates.Entry{Address: s.Address, Port: s.Port, Service: s.Service, State: s.State, Until: s.Until}
		if !slices.ContainsFunc(entries, func(o backendstates.Entry) bool { return o.Same(&e) }) {
			list = append(list, backendLine{Entry: e, InForce: &yes, Elsewhere: true})
		}
	}
	return list
}

func backendRow(l *backendLine) []string {
	service, since, until, inForce := l.Service, "", "", ""
	if service == "" {
		service = "all"
	}
	if !l.Since.IsZero() {
		since = l.Since.Format(time.RFC3339)
	}
	if !l.Until.IsZero() {
		until = l.Until.Format(time.RFC3339)
	}
	switch {
	case l.Elsewhere:
		inForce = "yes, from another directory"
	case l.InForce != nil:
		inForce = map[bool]string{true: "yes", false: "not yet"}[*l.InForce]
	}
	return []string{l.Backend(), service, l.State.String(), since, until, inForce}
}

// watchedBackends are rows to watch.
func watchedBackends(list []backendLine) []watched {
	rows := make([]watched, len(list))
	for i := range list {
		cells := backendRow(&list[i])
		rows[i] = watched{key: strings.Join(cells[:2], " "), version: strings.Join(cells[2:], " "), cells: cells, object: &list[i]}
	}
	return rows
}
