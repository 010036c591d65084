// SPDX-License-Identifier: Apache-2.0

package klipperlb

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// recheck is the time between two looks at the rules.
const recheck = 10 * time.Second

// Main runs until SIGTERM, and returns the exit code.
func Main() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	defer klog.Flush()
	e, err := Read(os.LookupEnv)
	if err == nil {
		err = Run(ctx, e)
	}
	if err != nil {
		klog.Background().Error(err, "Cannot serve the port")
		return 1
	}
	return 0
}

// Run writes the rules, writes them again when they are lost, and removes them when ctx is done.
func Run(ctx context.Context, e Environment) error {
	logger := klog.FromContext(ctx)
	tools, families, err := open(ctx, &e)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		for _, f := range families {
			if err := remove(ctx, tools, &e, f); err != nil {
				logger.Error(err, "Cannot remove the rules", "family", f)
			}
		}
	}()
	ticker := time.NewTicker(recheck)
	defer ticker.Stop()
	var written [inet.Families][][]string // as the tools print them
	for first, repaired := true, 0; ; first = false {
		for _, f := range families {
			wrote, err := ensure(ctx, tools, &e, f, &written[f])
			switch {
			case ctx.Err() != nil:
			case err != nil && first:
				return err
			case err != nil:
				logger.Error(err, "Cannot look at the rules; trying again", "family", f, "interval", recheck)
			case wrote && first:
				logger.Info("Leading a port to addresses", "family", f, "protocol", e.Protocol, "port", e.Port, "to", e.Targets[f], "targetPort", e.TargetPort, "sources", e.Ranges[f], "iptables", tools.Variant())
			case wrote:
				repaired++
				logger.Info("Rules were lost; written again", "family", f, "times", repaired)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// open finds the tools, and the families that can be served.
func open(ctx context.Context, e *Environment) (*xtables.Tools, []inet.Family, error) {
	tools, err := xtables.Find(ctx)
	if err != nil {
		return nil, nil, err
	}
	var families []inet.Family
	var errs []error
	for f := range inet.Families {
		if len(e.Targets[f]) == 0 {
			continue
		}
		err := forwards(f)
		if err == nil {
			if err = tools.Usable(ctx, f); err != nil {
				if other, anyway := xtables.New(another(tools.Variant())); anyway == nil && other.Usable(ctx, f) == nil {
					tools, err = other, nil
				}
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f, err))
			continue
		}
		families = append(families, f)
	}
	if len(families) == 0 {
		return nil, nil, errors.Join(errs...)
	}
	for _, err := range errs {
		klog.FromContext(ctx).Info("A family is not served", "reason", err.Error())
	}
	return tools, families, nil
}

func another(v xtables.Variant) xtables.Variant {
	if v == xtables.NFT {
		return xtables.Legacy
	}
	return xtables.NFT
}

// forwards returns nil if this network namespace forwards packets of a family.
func forwards(f inet.Family) error {
	path := map[inet.Family]string{inet.IPv4: "/proc/sys/net/ipv4/ip_forward", inet.IPv6: "/proc/sys/net/ipv6/conf/all/forwarding"}[f]
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(text)) == "0" {
		return fmt.Errorf("%s is 0: the pod needs it in securityContext.sysctls", strings.ReplaceAll(strings.TrimPrefix(path, "/proc/sys/"), "/", "."))
	}
	return nil
}

func look(ctx context.Context, tools *xtables.Tools, f inet.Family) (state, error) {
	tables, err := tools.SaveAll(ctx, f, "filter", "nat")
	return tables, err
}

// ensure writes the rules of a family if they are not those that were written before.
func ensure(ctx context.Context, tools *xtables.Tools, e *Environment, f inet.Family, written *[][]string) (wrote bool, err error) {
	s, err := look(ctx, tools, f)
	if err != nil {
		return false, err
	}
	if own := s.own(e); own != nil && *written != nil && slices.EqualFunc(own, *written, slices.Equal[[]string]) {
		return false, nil
	}
	if err = tools.Restore(ctx, f, e.input(f, func(h hook) bool { return s.jumps(e, h) > 0 })); err != nil {
		return false, err
	}
	if s, err = look(ctx, tools, f); err == nil {
		*written = s.own(e)
	}
	return true, err
}

func remove(ctx context.Context, tools *xtables.Tools, e *Environment, f inet.Family) error {
	s, err := look(ctx, tools, f)
	if err != nil {
		return err
	}
	return tools.Restore(ctx, f, e.removal(func(h hook) int { return s.jumps(e, h) }))
}
