// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/component-base/logs"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/dirwatch"
	"github.com/tandem-proxy/tandem/sources/manifests"
	"github.com/tandem-proxy/tandem/sources/nodefacts"
)

const (
	// reloadSettle is how long the file must stay as it is before it counts. Editors
	// write in place, or move the old file away first.
	reloadSettle = time.Second
	// reloadRescan is for what inotify does not see: a link to elsewhere, for one.
	reloadRescan = 30 * time.Second
)

// Fields that a running process applies. reloadedPolicy decides how Services are served, and
// reloadedRest is about timing, the process itself, or nothing at all. A change of any other
// field ends the process, so that it is started again: the kernel state goes on working, and
// what depends on the field is decided at the start.
var (
	reloadedPolicy = []string{
		"clusterCIDR", "detectLocalMode", "detectLocal", "nodePortAddresses",
		"iptables.masqueradeAll", "iptables.localhostNodePorts", "nftables.masqueradeAll", config.TandemKind + ".strictSourceRanges",
		config.TandemKind + ".loadBalancer.algorithm", config.TandemKind + ".loadBalancer.maglevTableSize", config.TandemKind + ".loadBalancer.maglevSeed",
		config.TandemKind + ".ebpf.masqueradeLocalBackends",
	}
	reloadedRest = []string{
		"iptables.syncPeriod", "iptables.minSyncPeriod", "ipvs.syncPeriod", "ipvs.minSyncPeriod",
		config.TandemKind + ".takeOverDelay", config.TandemKind + ".ebpf.syncPeriod", config.TandemKind + ".ebpf.minSyncPeriod",
		"logging.verbosity", "logging.flushFrequency", "oomScoreAdj",
		"configSyncPeriod", "nftables", "portRange", "windowsRunAsService", "winkernel",
	}
)

// among reports whether a field is one of these or in one of them.
func among(fields []string, path string) bool {
	return slices.ContainsFunc(fields, func(at string) bool { return path == at || strings.HasPrefix(path, at+".") })
}

// needsRestart reports whether a field can only be applied at the start.
func needsRestart(m mode, path string) bool {
	return m.needsRestart(path) || !among(reloadedPolicy, path) && !among(reloadedRest, path)
}

// reloader follows the file of --config while the process runs.
type reloader struct {
	// start are the options of the process, and running is the configuration in force.
	start   *Options
	running *config.Config
	mode    mode
	// check reports whether a process could run with these options, and apply applies the
	// changed fields.
	check    func(context.Context, *Options) error
	apply    func(*Options, []config.Difference) error
	reporter proxier.Reporter
	metrics  *metrics.Metrics
	settle   time.Duration
	clock    clock.Clock

	// seen is the file at the last look, which counts from that time on if it stays so;
	// done is the file when it last counted.
	seen, done fileState
	counts     time.Time
}

// fileState is the text of the file, or why there is none.
type fileState struct {
	text, failure string
	read          bool // at all
}

func stateOf(path string) fileState {
	text, err := os.ReadFile(path)
	if err != nil {
		return fileState{failure: err.Error(), read: true}
	}
	return fileState{text: string(text), read: true}
}

func (p *proxy) reloader(px *proxier.Proxier) *reloader {
	return &reloader{
		start: p.opts, running: p.opts.Config, mode: p.mode, check: p.couldRun, reporter: p.problems, metrics: p.metrics, settle: reloadSettle, clock: clock.RealClock{},
		apply: func(next *Options, changed []config.Difference) error {
			c := next.Config
			if slices.ContainsFunc(changed, func(d config.Difference) bool { return among(reloadedPolicy, d.Path) }) {
				settings, err := nodefacts.New(c, next.gate)
				if err != nil {
					return err
				}
				p.facts.revise(settings, px)
			}
			intervals := modeNamed(&host{config: c}, p.mode.name()).intervals()
			px.SetIntervals(intervals)
			p.health.SetTimeout(2 * intervals.MaxInterval)
			return errors.Join(applyToProcess(c, changed), show(p.configz, c))
		},
	}
}

// applyToProcess applies what is not about Services. What did not change is left alone:
// the verbosity may have been set at /debug/flags/v meanwhile.
func applyToProcess(c *config.Config, changed []config.Difference) error {
	var errs []error
	for _, d := range changed {
		switch l := &c.KubeProxy.Logging; d.Path {
		case "logging.verbosity":
			_, err := logs.GlogSetter(strconv.FormatUint(uint64(l.Verbosity), 10))
			errs = append(errs, err)
		case "logging.flushFrequency":
			klog.StartFlushDaemon(l.FlushFrequency.Duration.Duration)
		case "oomScoreAdj":
			errs = append(errs, setOOMScore(*c.KubeProxy.OOMScoreAdj))
		}
	}
	return errors.Join(errs...)
}

// couldRun returns the error that a process with these options would end with as it starts.
func (p *proxy) couldRun(ctx context.Context, o *Options) error {
	if err := checkFamilies(o.Config, p.families); err != nil {
		return err
	}
	if _, _, err := selectMode(ctx, &host{config: o.Config, gate: o.gate, report: p.host.report}); err != nil {
		return err
	}
	if _, err := nodefacts.New(o.Config, o.gate); err != nil {
		return err
	}
	if dir := o.Config.Tandem.Manifests; dir != "" {
		return manifests.Check(dir)
	}
	_, err := newClient(o)
	return err
}

// run follows the file until ctx is done, or the process has to be started again.
func (r *reloader) run(ctx context.Context) error {
	path := r.start.ConfigFile
	dir := filepath.Dir(path)
	watcher := dirwatch.Open(dir, dirwatch.Options{
		Wanted: func(name string) bool { return name == filepath.Base(path) },
		Unwatched: func(err error) {
			klog.FromContext(ctx).Error(err, "Cannot watch the directory of the configuration file; reading the file at intervals", "directory", dir, "every", reloadRescan)
		},
		Debounce: min(50*time.Millisecond, r.settle), Rescan: reloadRescan, Clock: r.clock,
	})
	defer watcher.Close()
	for {
		if info, err := os.Stat(dir); err == nil {
			watcher.Follow(info)
		}
		again, err := r.look(ctx)
		if err != nil {
			return err
		}
		if _, ok := watcher.Next(ctx, again); !ok {
			return nil
		}
	}
}

// look reads the file, and acts once it is another and stays so. It returns when to look
// again, if that is known.
func (r *reloader) look(ctx context.Context) (again time.Time, err error) {
	now := r.clock.Now()
	if state := stateOf(r.start.ConfigFile); state != r.seen {
		r.seen, r.counts = state, now.Add(r.settle)
	}
	if r.seen == r.done {
		return time.Time{}, nil
	}
	if now.Before(r.counts) {
		return r.counts, nil
	}
	next := *r.start
	err = next.Complete(r.start.flags)
	if err == nil {
		err = next.Validate()
	}
	var changed []config.Difference
	if err == nil {
		changed, err = config.Differences(r.running, next.Config)
	}
	if err == nil && len(changed) > 0 { // else it runs as it is
		err = r.check(ctx, &next)
	}
	if stateOf(r.start.ConfigFile) != r.seen {
		return now, nil // the file changed while it was read
	}
	first := !r.done.read
	r.done = r.seen
	if err != nil {
		r.failed(err)
		return time.Time{}, nil
	}
	return time.Time{}, r.update(ctx, &next, changed, first)
}

// failed reports an invalid file. The previous configuration stays in force.
func (r *reloader) failed(err error) {
	r.metrics.ConfigReloaded(metrics.ReloadFailed)
	r.reporter.Report(proxier.Problem{
		Kind: "Node", Reason: proxier.ReasonInvalidConfig,
		Message: fmt.Sprintf("invalid configuration file %s; keeping the previous configuration, but a restart would fail: %s",
			r.start.ConfigFile, strings.ReplaceAll(err.Error(), "\n", "; ")),
	})
}

// update applies what has changed in the file. An error says that it needs a restart.
func (r *reloader) update(ctx context.Context, next *Options, changed []config.Difference, first bool) error {
	logger := klog.FromContext(ctx).WithValues("file", r.start.ConfigFile)
	if len(changed) == 0 {
		r.metrics.ConfigFile(r.seen.text)
		if first { // unchanged since the start of the process
			return nil
		}
		next.warn(logger)
		logger.Info("The configuration file has changed, without a change of any value")
		r.metrics.ConfigReloaded(metrics.ReloadUnchanged)
		return nil
	}
	var list, restart []string
	for _, d := range changed {
		list = append(list, d.String())
		if needsRestart(r.mode, d.Path) {
			restart = append(restart, d.Path)
		}
	}
	if len(restart) > 0 {
		logger.Info("The configuration file has changed; exiting, since some fields need a restart. Services are still served", "changed", list, "needRestart", restart)
		return fmt.Errorf("the configuration file %s has changed, and these fields need a restart: %s", r.start.ConfigFile, strings.Join(restart, ", "))
	}
	if err := r.apply(next, changed); err != nil {
		logger.Error(err, "Cannot apply all changes of the configuration file", "changed", list)
	}
	next.warn(logger)
	logger.Info("Applied the changed configuration file", "changed", list)
	r.running = next.Config
	r.metrics.ConfigFile(r.seen.text)
	r.metrics.ConfigReloaded(metrics.ReloadApplied)
	return nil
}
