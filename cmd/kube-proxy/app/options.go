// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	metricsfeatures "k8s.io/component-base/metrics/features"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
)

// Options are the command line, and with Complete all that it leads to.
type Options struct {
	// ConfigFile holds most options; see package config for what wins.
	ConfigFile string
	// Master is the URL of the API server and takes precedence over the kubeconfig's.
	Master string
	// Cleanup removes the kernel state, and does nothing else.
	Cleanup bool
	// WriteConfigTo is a file that the configuration is written to, and InitOnly changes
	// the settings that take more privileges than the rest; nothing else is done then.
	WriteConfigTo string
	InitOnly      bool
	// ValidateOnly validates the configuration, and does nothing else.
	ValidateOnly bool
	// CapabilityMask overrides results of capability probes, for tests.
	CapabilityMask string

	// Config is bound to flags first; Complete replaces it by the file's.
	Config *config.Config

	// As Complete found them.
	flags    *pflag.FlagSet // to read the file again with, and for /flagz
	nodeName string
	gate     featuregate.MutableVersionedFeatureGate
	mask     map[capabilities.Feature]capabilities.State
	warnings []string
	errs     []error // for Validate
}

// NewOptions has the defaults.
func NewOptions() *Options { return &Options{Config: config.New()} }

// AddFlags adds every flag, in groups.
func (o *Options) AddFlags(sets *cliflag.NamedFlagSets) {
	fs := sets.FlagSet("general")
	fs.StringVar(&o.ConfigFile, "config", o.ConfigFile, "Path of a file with a KubeProxyConfiguration and, as a second YAML document, a TandemConfiguration. With a file, only these flags have an effect: --proxy-mode, --hostname-override, --master, --manifests, --strict-source-ranges, --lb-algorithm, --maglev-table-size, --maglev-seed, --ipvs-upstream-semantics, --ipvs-drain-timeout, --coexist*, --take-over-delay, --state-dir, --ebpf-*, --cleanup, --init-only, --write-config-to, --validate-only, and the flags for logs.")
	fs.BoolVar(&o.Cleanup, "cleanup", o.Cleanup, "Remove all kernel state created by this proxy or by upstream's, in any mode, and exit. While a kube-proxy serves this node, nothing is removed.")
	fs.StringVar(&o.WriteConfigTo, "write-config-to", o.WriteConfigTo, "Write the configuration that results from file, flags and defaults to this file, and exit.")
	fs.BoolVar(&o.ValidateOnly, "validate-only", o.ValidateOnly, "Print all errors in the configuration, with file, line and field, and exit. Nothing else is done.")
	fs.BoolVar(&o.InitOnly, "init-only", o.InitOnly, "Apply the kernel settings that need more privileges than CAP_NET_ADMIN (those of conntrack and of the mode), and exit. Afterwards, modes iptables and ipvs can run without those privileges; mode ebpf needs CAP_SYS_ADMIN as long as it runs.")
	// Flags of libraries that upstream links. They are not used here.
	fs.String("boot-id-file", "/proc/sys/kernel/random/boot_id", "Accepted, as upstream does, and has no effect.")
	fs.String("machine-id-file", "/etc/machine-id,/var/lib/dbus/machine-id", "Accepted, as upstream does, and has no effect.")
	// They cannot fail: the flags are there.
	_ = fs.MarkHidden("boot-id-file")
	_ = fs.MarkHidden("machine-id-file")
	o.Config.AddFlags(sets)
	if gate, err := config.NewFeatureGate(); err == nil { // Complete returns the error
		f := fs.Lookup("feature-gates")
		f.Usage += " Known features:\n" + strings.Join(gate.KnownFeatures(), "\n")
	}
	fs = sets.FlagSet("API server")
	fs.StringVar(&o.Master, "master", o.Master, "URL of the API server. Takes precedence over the kubeconfig.")
	fs.StringVar(&o.CapabilityMask, "ebpf-capability-mask", o.CapabilityMask, "Results of capability probes to assume, for tests: set_retval=no,batch=no")
	// It cannot fail: the flag is there.
	_ = fs.MarkHidden("ebpf-capability-mask")
}

// Complete reads the file, if one is given, and works out what follows from
// the options. Errors in either are reported by Validate, with all others; an error
// that is returned means that there is nothing to validate.
func (o *Options) Complete(fs *pflag.FlagSet) error {
	o.flags, o.warnings, o.errs = fs, nil, nil
	if o.ConfigFile == "" {
		o.Config.CompleteFromFlags(fs)
		if o.WriteConfigTo == "" {
			o.Config.DropServers()
		}
	} else {
		loaded, warnings, err := config.Load(o.ConfigFile)
		if loaded == nil {
			return err
		}
		ignored, flagErr := loaded.OverrideWithFlags(fs)
		if len(ignored) > 0 {
			warnings = append(warnings, fmt.Sprintf("--config is given, so these flags have no effect: %s", strings.Join(ignored, ", ")))
		}
		o.Config, o.warnings = loaded, warnings
		o.wrong("", err, flagErr)
	}

	o.Config.MoveSharedServers()
	k := &o.Config.KubeProxy
	var err error
	o.nodeName, err = nodeName(k.HostnameOverride)
	o.wrong("", err)
	if fs.Changed("hostname-override") && k.HostnameOverride != "" {
		k.HostnameOverride = o.nodeName
	}
	o.mask, err = capabilities.ParseMask(o.CapabilityMask)
	o.wrong("--ebpf-capability-mask", err)
	if o.gate, err = config.NewFeatureGate(); err != nil {
		return err
	}
	o.setGates(k.FeatureGates)
	return nil
}

// setGates reports all invalid gates, sorted: the library stops at the first unknown one.
func (o *Options) setGates(wanted map[string]bool) {
	where := func(name string) string {
		from := o.Config.Origin("featureGates." + name)
		if from == "" {
			from = o.Config.Origin("featureGates")
		}
		if !strings.HasPrefix(from, "--") {
			from += ": featureGates"
		}
		return from
	}
	wanted, removed := config.DropRemovedGates(wanted)
	for _, name := range slices.Sorted(maps.Keys(removed)) {
		o.warnings = append(o.warnings, where(name)+": "+removed[name])
	}
	known, all := o.gate.GetAll(), map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		if _, ok := known[featuregate.Feature(name)]; !ok {
			o.wrong(where(name), fmt.Errorf("unrecognized feature gate: %s", name))
			continue
		}
		all[name] = wanted[name]
	}
	err := o.gate.SetFromMap(all)
	var several utilerrors.Aggregate
	if errors.As(err, &several) {
		errs := several.Errors()
		slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
		o.wrong(where(""), errs...)
		return
	}
	o.wrong(where(""), err)
}

// wrong keeps errors for Validate.
func (o *Options) wrong(where string, errs ...error) {
	for _, err := range errs {
		switch {
		case err == nil:
		case where == "":
			o.errs = append(o.errs, err)
		default:
			o.errs = append(o.errs, fmt.Errorf("%s: %w", where, err))
		}
	}
}

// nodeName is the name under which the cluster knows this node.
func nodeName(override string) (string, error) {
	name := strings.ToLower(strings.TrimSpace(override))
	if name != "" {
		return name, nil
	}
	if override != "" {
		return "", errors.New("--hostname-override: the name is blank")
	}
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("find the name of this node: %w; set --hostname-override", err)
	}
	if name = strings.ToLower(strings.TrimSpace(host)); name == "" {
		return "", errors.New("find the name of this node: the host has no name; set --hostname-override")
	}
	return name, nil
}

// Validate returns everything that is wrong, as one error.
func (o *Options) Validate() error {
	errs := append(slices.Clone(o.errs), o.Config.Explain(o.Config.Validate()))
	if o.gate != nil {
		logErrs := logsapi.Validate(&o.Config.KubeProxy.Logging, o.gate, field.NewPath("logging"))
		errs = append(errs, o.Config.Explain(logErrs))
	}
	// Kernel state of any mode can be cleaned up.
	if !o.Cleanup {
		if err := o.validateMode(); err != nil {
			from := o.Config.Origin("mode")
			if !strings.HasPrefix(from, "--") {
				from += ": mode"
			}
			errs = append(errs, fmt.Errorf("%s: %w", from, err))
		}
	}
	if o.Config.Tandem.Manifests != "" && o.Master != "" {
		errs = append(errs, fmt.Errorf("--manifests replaces the API server, but --master names one: %q", o.Master))
	}
	return errors.Join(errs...)
}

func (o *Options) validateMode() error {
	wanted := append(fallbackModes(o.Config), capabilities.Mode(o.Config.KubeProxy.Mode))
	for _, m := range modesOf(nil) {
		gate := m.featureGate()
		if gate != "" && slices.Contains(wanted, m.name()) && o.gate != nil && !o.gate.Enabled(gate) {
			return fmt.Errorf("mode %s is turned off by the feature gate %s", m.name(), gate)
		}
	}
	return config.ValidateMode(string(o.Config.KubeProxy.Mode), modeNames())
}

// writeConfig writes the configuration to a file.
func (o *Options) writeConfig(logger klog.Logger) error {
	text, err := o.Config.Encode()
	if err != nil {
		return err
	}
	if err := os.WriteFile(o.WriteConfigTo, text, 0o644); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	logger.Info("Wrote configuration", "file", o.WriteConfigTo)
	return nil
}

// Run does what the options ask for until ctx is done.
func (o *Options) Run(ctx context.Context) error {
	if o.WriteConfigTo != "" {
		o.warn(klog.FromContext(ctx))
		return o.writeConfig(klog.FromContext(ctx))
	}
	metricsfeatures.ApplyFeatureGates(o.gate)
	if err := logsapi.ValidateAndApply(&o.Config.KubeProxy.Logging, o.gate); err != nil {
		return fmt.Errorf("set up logging: %w", err)
	}
	logger := klog.FromContext(ctx)
	o.warn(logger)
	switch {
	case o.Cleanup:
		return cleanup(ctx, &host{config: o.Config})
	case o.InitOnly:
		return initialize(ctx, o)
	}
	logger.Info("Starting Tandem", "version", buildVersion(), "node", o.nodeName)
	err := runProxy(ctx, o)
	if err == nil || errors.Is(err, context.Canceled) && ctx.Err() != nil {
		logger.Info("Stopped; Services are still served by the kernel state")
		return nil
	}
	return err
}

func (o *Options) warn(logger klog.Logger) {
	for _, warning := range o.warnings {
		logger.Info("Part of the configuration is ignored", "what", warning)
	}
}
