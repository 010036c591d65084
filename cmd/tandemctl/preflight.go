// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tandem-proxy/tandem/capabilities"
	kubeproxy "github.com/tandem-proxy/tandem/cmd/kube-proxy/app"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/observe/preflight"
	"github.com/tandem-proxy/tandem/proxier"
)

// Exit codes of preflight.
const (
	exitGo      = 0
	exitRemarks = 1
	exitNo      = 2
)

// verdicts are what the exit codes mean.
var verdicts = []string{exitGo: "go", exitRemarks: "go with remarks", exitNo: "no"}

// exitCode ends the program with this code, and says nothing.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// codeError is an error with an exit code of its own.
type codeError struct {
	error
	code int
}

func (e codeError) Unwrap() error { return e.error }

// proxyFlags are those of a kube-proxy, to find out what it would do or should have done.
type proxyFlags struct {
	config, node, manifests, mode string
}

// usualConfig is where kubeadm's DaemonSet and the chart mount the configuration.
const usualConfig = "/var/lib/kube-proxy/config.conf"

func (p *proxyFlags) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&p.config, "config", "", "configuration file of kube-proxy (default: "+usualConfig+" if it exists)")
	fs.StringVar(&p.node, "node", "", "name of this node (default: $NODE_NAME, or the name of the host)")
	fs.StringVar(&p.manifests, "manifests", "", "directory of manifests to read instead of asking the API server")
}

// args are the command line of kube-proxy. More are its flags after "--".
func (p *proxyFlags) args(more []string) []string {
	if p.config == "" {
		if _, err := os.Stat(usualConfig); err == nil {
			p.config = usualConfig
		}
	}
	if p.node == "" {
		p.node = os.Getenv("NODE_NAME")
	}
	var list []string
	for _, flag := range [][2]string{{"config", p.config}, {"hostname-override", p.node}, {"manifests", p.manifests}, {"proxy-mode", p.mode}} {
		if flag[1] != "" {
			list = append(list, "--"+flag[0]+"="+flag[1])
		}
	}
	return append(list, more...)
}

// afterDash allows arguments only after "--".
func afterDash(c *cobra.Command, list []string) error {
	at := c.ArgsLenAtDash()
	if at < 0 {
		at = len(list)
	}
	return cobra.NoArgs(c, list[:at])
}

func (a *app) preflightCommand() *cobra.Command {
	var flags proxyFlags
	var patience time.Duration
	c := &cobra.Command{
		Use:   "preflight [flags] [-- FLAGS-OF-KUBE-PROXY]",
		Short: "Say whether kube-proxy can start on this node, and what would change",
		Long: `Finds out what a kube-proxy of Tandem would do on this node: which mode would run
and why, what would serve each Service, which sysctls would change, and what else
acts on Service traffic: other proxies, CNIs, firewalls, meshes, encryption, BPF
programs of others. It changes nothing, and needs no kube-proxy.

Services come from the API server that the configuration names, or from manifests.
With -o wide, it also shows Services without a peculiarity, and all features of
the kernel. Flags after "--" are those of kube-proxy. What this process has no privileges to
read is listed.

Exit codes: 0 go, 1 go with remarks (or something could not be read), 2 no.`,
		Example: `  tandemctl preflight
  tandemctl preflight -o wide
  tandemctl preflight --manifests ./manifests --node node1 -- --cluster-cidr=10.244.0.0/16
  tandemctl preflight -o json | jq '.findings[] | select(.severity != "info")'`,
		Args: args(afterDash),
		RunE: func(c *cobra.Command, more []string) error {
			r, err := a.preflight(c.Context(), flags.args(more), patience)
			if err != nil {
				return codeError{err, exitNo}
			}
			if a.isData() {
				err = a.writeData("PreflightReport", r)
			} else {
				err = writePreflight(a.tables(), r, a.output == outputWide)
			}
			if code := slices.Index(verdicts, r.Verdict); err == nil && code != exitGo {
				return exitCode(code)
			}
			return err
		},
	}
	fs := c.Flags()
	flags.addFlags(fs)
	fs.StringVar(&flags.mode, "proxy-mode", "ebpf", "mode to try, whatever the configuration file says")
	fs.DurationVar(&patience, "timeout", 30*time.Second, "how long to wait for the objects")
	return c
}

// preflightReport is what preflight shows.
type preflightReport struct {
	Node    string `json:"node"`
	Verdict string `json:"verdict"`
	// Mode is the mode that would run, empty for none; Requested is the one to try.
	Mode      string                `json:"mode"`
	Requested string                `json:"requested"`
	Reasons   []capabilities.Reason `json:"reasons"`
	Degraded  []capabilities.Reason `json:"degraded"`
	Kernel    capabilities.Report   `json:"kernel"`
	// Uplinks are the devices on which programs would serve clients outside.
	Uplinks  []string        `json:"uplinks"`
	Settings []sysctl.Change `json:"settings"`
	// Services says what would serve each frontend; null if the objects are not known.
	Services []explain.Placement `json:"services"`
	// Problems are mistakes in objects and configuration.
	Problems []string            `json:"problems"`
	Findings []preflight.Finding `json:"findings"`
	Unseen   []preflight.Unseen  `json:"unseen"`
}

func (a *app) preflight(ctx context.Context, args []string, patience time.Duration) (*preflightReport, error) {
	f, err := kubeproxy.NewForecast(args)
	if err != nil {
		return nil, usageError{err}
	}
	root := a.cgroupRoot
	if root == "" {
		root = f.Config().Tandem.EBPF.CgroupRoot
	}
	if root == "" {
		root, _ = a.findRoot() // the mode says what is missing
	}
	f.Config().Tandem.EBPF.CgroupRoot = root
	r := &preflightReport{
		Node: f.Node, Requested: string(f.Config().KubeProxy.Mode), Problems: append([]string{}, f.Warnings...),
		Settings: []sysctl.Change{}, Uplinks: []string{}, Reasons: []capabilities.Reason{}, Degraded: []capabilities.Reason{}, Unseen: []preflight.Unseen{},
	}
	unseen := func(what string, err error) {
		if err != nil {
			r.Unseen = append(r.Unseen, preflight.Unseen{What: what, Why: err.Error()})
		}
	}
	table, err := knownTable(ctx, f, patience, func(text string) { r.Problems = append(r.Problems, text) })
	unseen("Services", err)
	var nodeIPs [proxier.Families]netip.Addr
	if table != nil {
		nodeIPs = table.Facts().NodeIPs
	}
	mode, err := f.Probe(ctx, table)
	if err != nil {
		return nil, err
	}
	r.Kernel, r.Mode = mode.Kernel, string(mode.Decision.Mode)
	r.Reasons, r.Degraded = append(r.Reasons, mode.Decision.Reasons...), append(r.Degraded, mode.Decision.Degraded...)
	r.Settings = append(r.Settings, mode.Settings...)
	unseen("some sysctls", mode.SettingsErr)
	if mode.NotTried != "" {
		r.Unseen = append(r.Unseen, preflight.Unseen{What: mode.NotTried, Why: "to try it would change kernel state"})
	}
	if table != nil && mode.Serves != nil {
		r.Services = explain.PlacementsOf(f.Node, r.Mode, table, func(d *proxier.Decision, f *proxier.Frontend, o proxier.Origin) (by, reason string, shown bool) {
			by, reason = mode.Serves(d, f, o)
			return by, reason, true
		}).Frontends
	}
	uplinks, err := f.Uplinks(nodeIPs)
	unseen("uplinks", err)
	for _, d := range uplinks.Devices {
		r.Uplinks = append(r.Uplinks, d.String())
	}

	k := &f.Config().KubeProxy
	where := preflight.Options{CgroupRoot: root, Health: addrPort(k.HealthzBindAddress), Metrics: addrPort(k.MetricsBindAddress)}
	if f.Config().Tandem.Coexistence.Enabled() {
		where.Other = netip.AddrPortFrom(netip.IPv4Unspecified(), config.MetricsPort)
	}
	facts := preflight.Read(ctx, where)
	for _, d := range uplinks.Devices {
		facts.Uplinks = append(facts.Uplinks, d.Name)
	}
	facts.ClusterIPs, facts.Programmable = clusterIPs(table), mode.Decision.Mode == capabilities.ModeEBPF
	r.Findings = preflight.Findings(facts)
	r.Unseen = append(r.Unseen, facts.Unseen...)
	r.Verdict = verdicts[r.code(mode.Decision.Err)]
	return r, nil
}

// code is the exit code.
func (r *preflightReport) code(noMode error) int {
	unserved := slices.ContainsFunc(r.Services, func(p explain.Placement) bool { return p.Carrier == "" })
	switch worst := preflight.Worst(r.Findings); {
	case noMode != nil:
		r.Findings = append([]preflight.Finding{{
			Severity: preflight.Blocker, Subject: "mode", What: noMode.Error(),
			Means: "kube-proxy would exit at its start.", Set: "Provide what is missing, or allow another mode (--ebpf-fallback).",
		}}, r.Findings...)
		return exitNo
	case worst == preflight.Blocker:
		return exitNo
	case worst == preflight.Remark, r.Mode != r.Requested, len(r.Unseen) > 0, unserved:
		return exitRemarks
	}
	return exitGo
}

// addrPort is an address of a server; the zero value if it is off.
func addrPort(text string) netip.AddrPort {
	a, _ := netip.ParseAddrPort(text)
	return a
}

// clusterIPs are the ClusterIPs of a table, with their Services.
func clusterIPs(table *proxier.Table) map[netip.Addr]string {
	found := map[netip.Addr]string{}
	if table == nil {
		return found
	}
	for _, c := range table.All() {
		for i := range c.New.Frontends {
			if f := &c.New.Frontends[i]; !f.Kind.External() {
				found[f.Addr.Addr()] = c.New.Name.Namespace + "/" + c.New.Name.Name
			}
		}
	}
	return found
}

func errObjects(patience time.Duration) error {
	return fmt.Errorf("the objects were not known after %s: check that the API server can be reached from here, and the privileges of the client", patience)
}

// firstSync is a tier that ends when it was given all objects.
type firstSync struct {
	noTier
	done context.CancelFunc
	all  bool
}

func (t *firstSync) Sync(context.Context, proxier.Update) error {
	t.all = true
	t.done()
	return nil
}

// knownTable returns the table of all objects, once they are known.
func knownTable(ctx context.Context, f *kubeproxy.Forecast, patience time.Duration, warn func(string)) (table *proxier.Table, err error) {
	if err := f.Connect(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tier := &firstSync{done: cancel}
	reporter := proxier.ReporterFunc(func(p proxier.Problem) { warn(problemText(p)) })
	err = f.Follow(ctx, tier, reporter, func(t *proxier.Table) { table = t })
	if !tier.all {
		if err == nil {
			err = ctx.Err()
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = errObjects(patience)
		}
		return nil, err
	}
	return table, nil
}
