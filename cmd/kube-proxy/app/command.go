// SPDX-License-Identifier: Apache-2.0

// Package app is the kube-proxy binary: its command line, and the wiring of
// sources, proxier, mode and servers into one process.
package app

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	cliflag "k8s.io/component-base/cli/flag"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo/fifo"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // rest_client_*
	_ "k8s.io/component-base/metrics/prometheus/version"    // kubernetes_build_info
	_ "k8s.io/component-base/metrics/prometheus/workqueue"
)

const long = `kube-proxy runs on every node and load-balances connections to the addresses of
Services among their endpoints.

This is Tandem, a drop-in replacement for the kube-proxy of Kubernetes with an
eBPF datapath: same flags, configuration file, ports and metrics. The kernel
state that it creates serves on while it is not running; --cleanup removes it.`

// NewCommand makes the command of the binary.
func NewCommand() *cobra.Command {
	cols, _, err := term.GetSize(int(os.Stdout.Fd()))
	if err != nil {
		cols = 0 // no terminal: lines as long as they are
	}
	return newCommand(cols)
}

func newCommand(cols int) *cobra.Command {
	opts := NewOptions()
	cmd := &cobra.Command{
		Use:  "kube-proxy",
		Long: long,
		Args: func(_ *cobra.Command, args []string) error {
			for _, arg := range args {
				if arg != "" { // as a manifest makes of a variable that is not set
					return fmt.Errorf("unexpected argument %q: every option is a flag", arg)
				}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if printed, err := printVersion(cmd.OutOrStdout(), cmd.Flags()); printed || err != nil {
				return err
			}
			if err := opts.Complete(cmd.Flags()); err != nil {
				return err
			}
			if opts.ValidateOnly {
				return opts.report(cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			if err := opts.Validate(); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			// A second signal ends the process at once.
			context.AfterFunc(ctx, stop)
			return opts.Run(ctx)
		},
	}
	var sets cliflag.NamedFlagSets
	sets.NormalizeNameFunc = cliflag.WordSepNormalizeFunc
	opts.AddFlags(&sets)
	fs := sets.FlagSet("general")
	fs.BoolP("help", "h", false, "Print this help and exit.")
	addVersionFlag(fs)
	for _, name := range sets.Order {
		cmd.Flags().AddFlagSet(sets.FlagSets[name])
	}
	cliflag.SetUsageAndHelpFunc(cmd, sets, cols)
	// A usage of several screens would hide the error below it.
	cmd.SilenceUsage = true
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return fmt.Errorf("%w (see --help)", err)
	})
	return cmd
}
