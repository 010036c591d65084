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

// removeNFTables removes the tables of upstream's mode nftables. Where there is no nft,
// nothing made any.
func removeNFTables(ctx context.Context) error {
	nft, err := exec.LookPath("nft")
	if err != nil {
		return nil
	}
	var errs []error
	for _, family := range []string{"ip", "ip6"} {
		out, err := exec.CommandContext(ctx, nft, "list", "tables", family).CombinedOutput()
		if err != nil {
			errs = append(errs, fmt.Errorf("list tables of nftables: %w: %s", err, bytes.TrimSpace(out)))
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
