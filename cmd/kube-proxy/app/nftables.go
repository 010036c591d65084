// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"k8s.io/klog/v2"
)

// nftables is upstream's mode of that name, which this proxy does not have. It may have run
// on this node before.
type nftables struct{}

func (nftables) what() string                                 { return "table of mode nftables" }
func (n nftables) retire(ctx context.Context, _ *parts) error { return n.cleanup(ctx) }

// cleanup removes the tables. Without nft on this host, nothing made any.
func (nftables) cleanup(ctx context.Context) error {
	nft, err := exec.LookPath("nft")
	if err != nil {
		return nil
	}
	var errs []error
	for _, family := range []string{"ip", "ip6"} {
		out, err := exec.CommandContext(ctx, nft, "list", "tables", family).CombinedOutput()
		if err != nil {
			errs = append(errs, fmt.Errorf("list nftables tables: %w: %s", err, bytes.TrimSpace(out)))
			continue
		}
		if !strings.Contains(string(out)+"\n", "table "+family+" kube-proxy\n") {
			continue
		}
		if out, err := exec.CommandContext(ctx, nft, "delete", "table", family, "kube-proxy").CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("delete the table of mode nftables: %w: %s", err, bytes.TrimSpace(out)))
			continue
		}
		klog.FromContext(ctx).Info("Removed the table of mode nftables", "family", family)
	}
	return errors.Join(errs...)
}
