// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/ipvs"
)

// cleanup removes what any process left in the kernel, whatever its mode: ours, and
// those of upstream.
func cleanup(ctx context.Context, c *config.Config) error {
	errs := []error{cleanupPrograms(ctx, c), removeNFTables(ctx)}
	for _, v := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		tools, err := xtables.New(v)
		if err != nil {
			continue // then nothing wrote any rules
		}
		errs = append(errs, iptables.Cleanup(ctx, tools, false))
	}
	errs = append(errs, iptables.RemoveCounters(ctx, nfacct.Kernel{}), removeIPVS(ctx, c, ipvs.Cleanup))
	return errors.Join(errs...)
}

func cleanupPrograms(ctx context.Context, c *config.Config) error {
	logger := klog.FromContext(ctx)
	root := c.Tandem.EBPF.CgroupRoot
	if root == "" {
		var err error
		root, err = capabilities.FindCgroup2Root(ownProc)
		if errors.Is(err, capabilities.ErrNoCgroup2) {
			logger.Info("There is no cgroup2 hierarchy, so there is nothing to remove")
			return nil
		}
		if err != nil {
			return err
		}
	}
	removed, err := ebpf.Cleanup(root)
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	if len(removed) == 0 {
		logger.Info("There was nothing to remove", "cgroupRoot", root)
		return nil
	}
	logger.Info("Removed the programs of ours, and their maps with them", "cgroupRoot", root, "programs", removed)
	return nil
}
