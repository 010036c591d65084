// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/observe/status"
	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/monitor"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
)

// Exit codes.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
)

// inspector is what the commands need of ebpf.Inspector.
type inspector interface {
	Status() (inspect.Status, error)
	Services() ([]inspect.ServiceView, error)
	WithPrograms(fn func([]*ciliumebpf.Program) error) error
	Flows(ctx context.Context, at, procRoot string, fn func(inspect.FlowView)) error
	Unplaced() int
	OptOuts() (map[uint64]lbmap.OptOutBy, error)
	AddOptOut(cookie uint64) error
	RemoveOptOut(cookie uint64) (bool, error)
	Close() error
}

// app is the tool with all its dependencies, so that tests can replace them.
type app struct {
	out, err io.Writer
	now      func() time.Time
	findRoot func() (string, error)
	inspect  func(cgroupRoot string) (inspector, error)
	filters  func(context.Context) []string
	monitor  func(perSecond uint32) (failureMonitor, error)
	detach   func(ctx context.Context, cgroupRoot string) (programs []string, err error)
	probe    func(ctx context.Context, cgroupRoot string, devices []string) capabilities.Report
	cookie   func(netns string) (uint64, error)
	owners   func() map[uint64][]int
	version  func() versionInfo
	servers  []string // default addresses of kube-proxy
	// findServers finds the addresses of a kube-proxy that is at none of those.
	findServers func(context.Context) []string

	cgroupRoot string
	output     string
}

func newApp(out, err io.Writer) *app {
	return &app{
		out: out, err: err,
		now:      time.Now,
		findRoot: func() (string, error) { return capabilities.FindCgroup2Root("/proc") },
		inspect: func(root string) (inspector, error) {
			i, err := inspect.Open(root)
			if err != nil {
				return nil, err // a nil *Inspector would be an inspector
			}
			return i, nil
		},
		filters: hostFilters,
		monitor: func(perSecond uint32) (failureMonitor, error) {
			m, err := monitor.New(perSecond)
			if err != nil {
				return nil, err // likewise
			}
			return m, nil
		},
		detach: removal.Detach,
		probe: func(ctx context.Context, root string, devices []string) capabilities.Report {
			return capabilities.Probe(ctx, capabilities.Options{CgroupRoot: root, Devices: devices})
		},
		cookie:  netns.CookieOf,
		owners:  func() map[uint64][]int { return netNSOwners("/proc", netns.CookieOf) },
		version: buildVersion,
		servers: defaultServers, findServers: findServers,
	}
}

// cgroupRootEnv is set where the cgroup hierarchy of the node is mounted at another place, as in pods of the chart.
const cgroupRootEnv = "TANDEM_CGROUP_ROOT"

// usageError is a mistake on the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// run is main without the process.
func (a *app) run(args []string) int {
	root := a.rootCommand()
	root.SetArgs(args)
	called, err := root.ExecuteContextC(context.Background())
	if err == nil {
		return exitOK
	}
	var told exitCode
	if errors.As(err, &told) {
		return int(told)
	}
	fmt.Fprintf(a.err, "tandemctl: %v\n", err)
	var usage usageError
	if errors.As(err, &usage) {
		fmt.Fprintf(a.err, "See '%s --help'.\n", called.CommandPath())
		return exitUsage
	}
	if next := a.advice(called, err); next != "" {
		fmt.Fprintf(a.err, "%s\n", next)
	}
	var coded codeError
	if errors.As(err, &coded) {
		return coded.code
	}
	return exitError
}

// advice says what to do about an error of a command.
func (a *app) advice(called *cobra.Command, err error) string {
	var coded codeError
	if errors.As(err, &coded) {
		return "" // of commands that say it themselves
	}
	if instead := a.insteadOf(called); instead != "" {
		return instead
	}
	switch {
	case errors.Is(err, inspect.ErrNotRunning):
		text := "Start kube-proxy in mode ebpf on this node. If it runs with --ebpf-cgroup-root, pass the same directory as --cgroup-root"
		if called.Flags().Lookup("server") != nil {
			text += "; if it runs in another mode, its --metrics-bind-address as --server"
		}
		return text + "."
	case errors.Is(err, removal.ErrServing):
		return "Stop kube-proxy on this node first, or change its mode, and run this again."
	case errors.Is(err, errNoServer):
		return "If kube-proxy runs on this node, pass its --metrics-bind-address as --server. Without a kube-proxy, explain from manifests: see --manifests."
	case errors.Is(err, lbmap.ErrLayout):
		return "Use the tandemctl of the same release as the kube-proxy of this node."
	case errors.Is(err, monitor.ErrNotSupported):
		return "Counters have the same reasons: see the packets in 'tandemctl status', and 'tandemctl top'."
	case errors.Is(err, capabilities.ErrNoCgroup2):
		return "Pass --cgroup-root."
	case errors.Is(err, fs.ErrPermission):
		return "Run it as root in the host's user namespace: opening BPF objects by id needs CAP_SYS_ADMIN, and before Linux 6.12 CAP_NET_ADMIN as well."
	}
	return ""
}

// ebpfOnly are the commands about what only mode ebpf has: what is true in the other modes, and what each of them has instead.
var ebpfOnly = map[string]struct{ both, iptables, ipvs string }{
	"flows": {"has no eBPF flows", "'conntrack -L' lists its connections", "'ipvsadm -Lnc' lists its connections"},
	"top": {
		"does not count the traffic of service ports",
		"'iptables-save -c -t nat' and 'ip6tables-save -c -t nat' show the counters of its rules",
		"'ipvsadm -Ln --rate' shows the rates of its virtual servers",
	},
	"monitor": {both: "does not report failures; 'tandemctl explain' says whether a connection is rejected or dropped, and why"},
	"optout":  {both: "load-balances no connections at sockets; there is nothing to opt out of"},
}

// insteadOf is what to do instead of a command that failed, if this node's kube-proxy answers and its mode does not have
// what the command is about.
func (a *app) insteadOf(called *cobra.Command) string {
	c := called
	for c.HasParent() && c.Parent().HasParent() {
		c = c.Parent() // optout, for optout list
	}
	only, ok := ebpfOnly[c.Name()]
	if !ok {
		return ""
	}
	process, err := askServer[status.Status](called.Context(), a, "", status.Path, nil)
	if err != nil {
		return "" // the error of the command matters
	}
	var instead string
	switch capabilities.Mode(process.Mode) {
	case capabilities.ModeIPTables:
		instead = only.iptables
	case capabilities.ModeIPVS:
		instead = only.ipvs
	default:
		return ""
	}
	if instead != "" {
		instead = "; " + instead
	}
	return fmt.Sprintf("This node's kube-proxy runs in mode %s, which %s%s.", process.Mode, only.both, instead)
}

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "tandemctl",
		Short: "Inspect and operate Tandem on this node",
		Long: `tandemctl reads the maps of the eBPF programs that are attached on this node, and
can detach these. It shows the state of the kernel, so kube-proxy need not be
running. It must run on the node itself (or in a pod that shares the node's cgroup
hierarchy), with CAP_SYS_ADMIN, and before Linux 6.12 with CAP_NET_ADMIN as well.

Some commands work in every mode. status shows the health of the running kube-proxy,
and sysdump collects everything for a bug report. explain shows how a connection is
served, and why; it asks a running kube-proxy, or reads a directory of manifests, and
needs no privileges. backend takes backends out of service, in a file that kube-proxy
follows. preflight and shadow look at a node before Tandem serves it.`,
		Example: `  tandemctl status
  tandemctl services
  tandemctl explain 10.244.1.7 10.96.0.10:53/udp
  tandemctl services default/kubernetes
  tandemctl services -n kube-system -o json
  tandemctl optout add --pid 4711`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},

		SuggestionsMinimumDistance: 2,
		Args:                       cobra.ArbitraryArgs,
		RunE:                       group,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if !slices.Contains(outputs, a.output) {
				return usagef("unknown output format %q: want %s", a.output, strings.Join(outputs, ", "))
			}
			return nil
		},
	}
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.PersistentFlags().StringVar(&a.cgroupRoot, "cgroup-root", os.Getenv(cgroupRootEnv), "cgroup2 directory that the programs are attached to (default: $"+cgroupRootEnv+", or the root of the mounted hierarchy)")
	root.PersistentFlags().StringVarP(&a.output, "output", "o", outputTable, "output format: "+strings.Join(outputs, ", ")+"; wide has more columns or rows, and is not cut to the terminal")
	root.AddCommand(a.statusCommand(), a.servicesCommand(), a.flowsCommand(), a.topCommand(), a.monitorCommand(), a.explainCommand(), a.preflightCommand(), a.shadowCommand(), a.sysdumpCommand(), a.capabilitiesCommand(), a.optOutCommand(), a.backendCommand(), a.detachCommand(), a.versionCommand())
	return root
}

// group is the action of a command that only has subcommands.
func group(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return c.Help()
	}
	text := fmt.Sprintf("unknown command %q for %q", args[0], c.CommandPath())
	if similar := c.SuggestionsFor(args[0]); len(similar) > 0 {
		text += fmt.Sprintf("; did you mean %s?", strings.Join(similar, " or "))
	}
	return usageError{errors.New(text)}
}

// args turns errors about arguments into usage errors.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, list []string) error {
		if err := check(c, list); err != nil {
			return usageError{err}
		}
		return nil
	}
}

// root is the cgroup that the programs are attached to.
func (a *app) root() (string, error) {
	if a.cgroupRoot != "" {
		return a.cgroupRoot, nil
	}
	root, err := a.findRoot()
	// That error names a flag of kube-proxy; advice names the one of this tool.
	if errors.Is(err, capabilities.ErrNoCgroup2) {
		err = capabilities.ErrNoCgroup2
	}
	return root, err
}

// withInspector opens the maps while fn runs.
func (a *app) withInspector(fn func(inspector) error) (err error) {
	root, err := a.root()
	if err != nil {
		return err
	}
	i, err := a.inspect(root)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, i.Close()) }()
	return fn(i)
}

func (a *app) capabilitiesCommand() *cobra.Command {
	var devices []string
	c := &cobra.Command{
		Use:     "capabilities",
		Aliases: []string{"caps"},
		Short:   "Show which features this node's kernel and tools have",
		Long: `Probes the kernel and looks for tools, as kube-proxy does when it starts. Nothing
is attached, and no kernel state is left. A result is inconclusive if this process
was not permitted to probe the feature.`,
		Example: `  tandemctl capabilities
  tandemctl capabilities --device eth0 -o json`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			report := a.probe(c.Context(), a.cgroupRoot, devices)
			if a.isData() {
				return a.writeData("Capabilities", report)
			}
			return report.WriteTable(a.out)
		},
	}
	c.Flags().StringSliceVar(&devices, "device", nil, "also probe this device for native XDP (can be repeated)")
	return c
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version of tandemctl",
		Args:  args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			v := a.version()
			if a.isData() {
				return a.writeData("Version", v)
			}
			_, err := fmt.Fprintf(a.out, "tandemctl %s (%s, %s)\n", v.Version, v.Revision, v.GoVersion)
			return err
		},
	}
}

// readDirNames lists a directory; nothing if it cannot be read.
func readDirNames(path string) []string {
	d, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	return names
}
