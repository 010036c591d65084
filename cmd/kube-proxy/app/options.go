// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation/field"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	metricsfeatures "k8s.io/component-base/metrics/features"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
)

// availableModes are the modes of this build.
var availableModes = []string{config.ModeEBPF, config.ModeIPVS, config.ModeIPTables}

// Options are the command line, and with Complete all that it leads to.
type Options struct {
	// ConfigFile holds most options; see package config for what wins.
	ConfigFile string
	// Master is the URL of the API server and wins over the kubeconfig's.
	Master string
	// Cleanup has the kernel state removed, and nothing else done.
	Cleanup bool
	// CapabilityMask pretends answers of the kernel, for tests.
	CapabilityMask string

	// Config is bound to flags first; Complete replaces it by the file's.
	Config *config.Config

	// As Complete found them.
	given    *pflag.FlagSet // what the command line said; also for /flagz
	nodeName string
	gate     featuregate.MutableVersionedFeatureGate
	mask     map[capabilities.Feature]capabilities.State
	warnings []string
}

// NewOptions has the defaults.
func NewOptions() *Options { return &Options{Config: config.New()} }

// AddFlags adds every flag, in groups.
func (o *Options) AddFlags(sets *cliflag.NamedFlagSets) {
	fs := sets.FlagSet("general")
	fs.StringVar(&o.ConfigFile, "config", o.ConfigFile, "Path of a file with a KubeProxyConfiguration and, as a second YAML document, a TandemConfiguration. With it, only these flags count besides: --proxy-mode, --hostname-override, --master, --manifests, --strict-source-ranges, --ebpf-*, --cleanup, and those for logs.")
	fs.BoolVar(&o.Cleanup, "cleanup", o.Cleanup, "Remove what this proxy, or upstream's, left in the kernel in any mode, and exit.")
	o.Config.AddFlags(sets)
	if gate, err := config.NewFeatureGate(); err == nil { // Complete tells of an error
		f := fs.Lookup("feature-gates")
		f.Usage += " Known are:\n" + strings.Join(gate.KnownFeatures(), "\n")
	}
	fs = sets.FlagSet("API server")
	fs.StringVar(&o.Master, "master", o.Master, "URL of the API server; it wins over the kubeconfig's.")
	fs.StringVar(&o.CapabilityMask, "ebpf-capability-mask", o.CapabilityMask, "Answers to assume instead of asking the kernel, for tests: set_retval=no,batch=no")
	// It cannot fail: the flag is there.
	_ = fs.MarkHidden("ebpf-capability-mask")
}

// Complete reads the file, if one is given, and works out what follows from
// the options.
func (o *Options) Complete(fs *pflag.FlagSet) error {
	o.given, o.warnings = fs, nil
	if o.ConfigFile == "" {
		o.Config.CompleteFromFlags(fs)
	} else {
		loaded, warnings, err := config.Load(o.ConfigFile)
		if err != nil {
			return err
		}
		ignored, err := loaded.OverrideWithFlags(fs)
		if err != nil {
			return err
		}
		if len(ignored) > 0 {
			warnings = append(warnings, fmt.Sprintf("--config is given, so these flags do not count: %s", strings.Join(ignored, ", ")))
		}
		o.Config, o.warnings = loaded, warnings
	}

	var errs []error
	var err error
	if o.nodeName, err = nodeName(o.Config.KubeProxy.HostnameOverride); err != nil {
		errs = append(errs, err)
	}
	if o.mask, err = capabilities.ParseMask(o.CapabilityMask); err != nil {
		errs = append(errs, fmt.Errorf("--ebpf-capability-mask: %w", err))
	}
	if o.gate, err = config.NewFeatureGate(); err != nil {
		errs = append(errs, err)
	} else if err := o.gate.SetFromMap(o.Config.KubeProxy.FeatureGates); err != nil {
		errs = append(errs, fmt.Errorf("feature gates: %w", err))
	}
	return errors.Join(errs...)
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
		return "", fmt.Errorf("name of this node: %w; set --hostname-override", err)
	}
	if name = strings.ToLower(strings.TrimSpace(host)); name == "" {
		return "", errors.New("name of this node: the host has none; set --hostname-override")
	}
	return name, nil
}

// Validate returns everything that is wrong, as one error.
func (o *Options) Validate() error {
	errs := []error{o.Config.Explain(o.Config.Validate())}
	if o.gate != nil {
		logErrs := logsapi.Validate(&o.Config.KubeProxy.Logging, o.gate, field.NewPath("logging"))
		errs = append(errs, o.Config.Explain(logErrs))
	}
	// Whatever mode ran before, its remains can be removed.
	if !o.Cleanup {
		if err := config.ValidateMode(string(o.Config.KubeProxy.Mode), availableModes); err != nil {
			from := o.Config.Origin("mode")
			if from == "" {
				from = "--proxy-mode"
			}
			errs = append(errs, fmt.Errorf("%s: %w", from, err))
		}
	}
	if o.Config.Tandem.Manifests != "" && o.Master != "" {
		errs = append(errs, fmt.Errorf("--manifests stands in for an API server, but --master names one: %q", o.Master))
	}
	return errors.Join(errs...)
}

// Run does what the options ask for until ctx is done.
func (o *Options) Run(ctx context.Context) error {
	metricsfeatures.ApplyFeatureGates(o.gate)
	if err := logsapi.ValidateAndApply(&o.Config.KubeProxy.Logging, o.gate); err != nil {
		return fmt.Errorf("set up logging: %w", err)
	}
	logger := klog.FromContext(ctx)
	o.warn(logger)
	if o.Cleanup {
		return cleanup(ctx, o.Config)
	}
	logger.Info("Starting Tandem", "version", buildVersion(), "node", o.nodeName)
	err := runProxy(ctx, o)
	if err == nil || errors.Is(err, context.Canceled) && ctx.Err() != nil {
		logger.Info("Stopped; what is in the kernel goes on working")
		return nil
	}
	return err
}

func (o *Options) warn(logger klog.Logger) {
	for _, warning := range o.warnings {
		logger.Info("A part of the configuration is not used", "what", warning)
	}
}
