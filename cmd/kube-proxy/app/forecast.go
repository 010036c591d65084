// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/hostfilter"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/apiserver"
	"github.com/tandem-proxy/tandem/sources/manifests"
	"github.com/tandem-proxy/tandem/sources/nodefacts"
)

// Forecast is what a process with some flags would do on this node. It changes nothing, in the
// kernel or elsewhere.
type Forecast struct {
	// Node is the name of the node.
	Node string
	// Warnings are about the flags and the configuration file.
	Warnings []string

	opts     *Options
	settings *nodefacts.Settings
	client   *apiserver.Client // nil with manifests
	host     *host             // of Probe
}

// NewForecast reads the flags of a process and its configuration file, and validates both.
func NewForecast(args []string) (*Forecast, error) {
	opts := NewOptions()
	var sets cliflag.NamedFlagSets
	sets.NormalizeNameFunc = cliflag.WordSepNormalizeFunc
	opts.AddFlags(&sets)
	fs := pflag.NewFlagSet("kube-proxy", pflag.ContinueOnError)
	fs.SetNormalizeFunc(cliflag.WordSepNormalizeFunc)
	fs.Usage = func() {}
	for _, name := range sets.Order {
		fs.AddFlagSet(sets.FlagSets[name])
	}
	if err := fs.Parse(args); err != nil {
		return nil, fmt.Errorf("flags of kube-proxy: %w", err)
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("flags of kube-proxy: unexpected argument %q", fs.Arg(0))
	}
	if err := opts.Complete(fs); err != nil {
		return nil, err
	}
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	f := &Forecast{Node: opts.nodeName, Warnings: opts.warnings, opts: opts}
	var err error
	if f.settings, err = nodefacts.New(opts.Config, opts.gate); err != nil {
		return nil, err
	}
	f.Warnings = append(f.Warnings, f.settings.Warnings...)
	return f, nil
}

// Config is the configuration that results from flags and file.
func (f *Forecast) Config() *config.Config { return f.opts.Config }

// Connect prepares the source of objects: the directory of manifests, or the API server. It does
// not connect to the latter yet.
func (f *Forecast) Connect() (err error) {
	if dir := f.opts.Config.Tandem.Manifests; dir != "" {
		return manifests.Check(dir)
	}
	f.client, err = newClient(f.opts)
	return err
}

// Mode is the mode that would run.
type Mode struct {
	// Kernel has the probed features, and Decision the mode with its reasons.
	Kernel   capabilities.Report
	Decision capabilities.Decision
	// Serves says what would serve a frontend for clients of an origin, as far as that can be
	// said without opening the datapath: by is empty for nothing, and reason is why the
	// datapath of the mode does not.
	Serves func(d *proxier.Decision, f *proxier.Frontend, o proxier.Origin) (by, reason string)
	// Settings are the sysctls that would change. SettingsErr is about those that could not be
	// changed or read.
	Settings    []sysctl.Change
	SettingsErr error
	// NotTried is what a process tries at its start and a forecast does not, since that
	// changes kernel state; or empty.
	NotTried string
}

// Probe finds out what the kernel can do, and which mode would run. Decision.Err is set if none
// could; the functions are nil then.
// The table is that of Follow, with all objects; nil if they are not known.
func (f *Forecast) Probe(ctx context.Context, table *proxier.Table) (*Mode, error) {
	var err error
	if f.host, err = probeHost(ctx, f.opts); err != nil {
		return nil, err
	}
	all := modesOf(f.host)
	mode := &Mode{Kernel: f.host.report, Decision: capabilities.Select(f.host.report, requestOf(f.host, all))}
	if mode.Decision.Err != nil {
		return mode, nil
	}
	m := named(all, mode.Decision.Mode)
	if table == nil {
		table = proxier.NewTable(proxier.Facts{}, proxier.Policy{})
	}
	forecast := m.forecast(table)
	mode.Settings, mode.SettingsErr = forecast.settings, forecast.settingsErr
	if !f.host.isShared() {
		changes, err := conntrackSettings(f.opts.Config).Changes(kernelSettings)
		mode.Settings, mode.SettingsErr = append(mode.Settings, changes...), errors.Join(mode.SettingsErr, err)
	}
	mode.NotTried = forecast.notTried
	mode.Serves = func(d *proxier.Decision, f *proxier.Frontend, o proxier.Origin) (by, reason string) {
		s := forecast.serves(d, f, o)
		if s.refused != nil {
			reason = s.refused.Error()
		}
		return string(s.by), reason
	}
	return mode, nil
}

// Uplinks are the devices on which clients outside this node would be served by programs.
func (f *Forecast) Uplinks(nodeIPs [proxier.Families]netip.Addr) (devices.Uplinks, error) {
	return devices.New(devices.Options{Names: f.opts.Config.Tandem.EBPF.Devices, NodeIPs: nodeIPs[:]}).List()
}

// Follow decides about the objects of the source, and gives the decisions to the tier, until ctx
// is done. It begins with a full sync when all objects are known. Known is called with the table
// before that.
func (f *Forecast) Follow(ctx context.Context, tier proxier.Tier, reporter proxier.Reporter, known func(*proxier.Table)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	facts := f.settings.Facts()
	var addresses nodefacts.Addresses
	var err error
	if facts.LocalAddrs, err = addresses.List(); err != nil {
		return err
	}
	if f.host != nil && !f.opts.Config.Tandem.EBPF.IgnoreHostFilters {
		all, _ := hostfilter.Read(ctx) // preflight tells what it could not read
		setFilters(&facts, all)
	}
	px, err := proxier.New(proxier.Options{
		NodeName: f.Node, Tier: tier, Facts: facts, Policy: f.settings.Policy, NodeFacts: f.settings.FromNode,
		Reporter: reporter, Runner: proxier.RunnerOptions{MaxInterval: proxier.DefaultRunnerOptions().MaxInterval, RetryInterval: proxier.DefaultRunnerOptions().RetryInterval},
	})
	if err != nil {
		return err
	}
	known(px.Table())
	var cidrs nodefacts.ServiceCIDRs
	var from source
	handler := &nodeBeforeServices{Handler: px, clock: clock.RealClock{}, released: func() {}}
	if f.client == nil {
		from = manifests.New(f.opts.Config.Tandem.Manifests, handler, reporter, manifests.Options{NodeName: f.Node, OnServiceCIDR: cidrs.Handler(px.UpdateFacts)})
	} else {
		from = apiserver.New(f.client, handler, apiserver.Options{
			NodeName: f.Node, OnServiceCIDR: cidrs.Handler(px.UpdateFacts), ServiceAnnotations: proxier.ServiceAnnotations, SliceAnnotations: proxier.SliceAnnotations,
		})
	}
	ended := make(chan error, 1)
	go func() {
		ended <- from.Run(ctx)
		cancel()
	}()
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		addresses.Watch(ctx, func(list []netip.Addr) { px.UpdateFacts(func(facts *proxier.Facts) { facts.LocalAddrs = list }) })
	}()
	px.Run(ctx)
	<-watched
	return <-ended
}

// forecast is what a mode would do if it was opened.
type forecast struct {
	serves      func(*proxier.Decision, *proxier.Frontend, proxier.Origin) serving
	settings    []sysctl.Change
	settingsErr error
	notTried    string
}

// setting adds a setting that would be changed.
func (f *forecast) setting(name, value string) {
	changes, err := kernelSettings.Compare(name, value)
	f.settings, f.settingsErr = append(f.settings, changes...), errors.Join(f.settingsErr, err)
}

// loopbackNodePorts adds the setting of NodePorts at loopback addresses, where rules serve those.
func (f *forecast) loopbackNodePorts(rules *proxier.NodeRules) {
	if len(rules.Loopback[proxier.IPv4]) > 0 {
		f.setting(routeLocalnet, "1")
	}
}
