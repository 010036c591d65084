// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
)

// cleanup removes what any process of ours left in the kernel.
func cleanup(ctx context.Context, c *config.Config) error {
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
