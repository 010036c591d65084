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

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/inet"
)

// nftables is upstream's mode of that name, which this proxy does not have. It may have run
// on this node before.
type nftables struct{}

const (
	// nftTable is the table of upstream, in each family.
	nftTable = "kube-proxy"
	// nftDrainTable takes its place while connections that it translated go on. The kernel
	// translates as long as there is a chain of type nat, and a rule that asks conntrack.
	nftDrainTable = "kube-proxy-drain"
)

func (nftables) what() string { return "tables of mode nftables" }

// retire removes the tables. Connections that they translated continue.
func (nftables) retire(ctx context.Context, _ *parts) error {
	return eachNFT(ctx, func(family inet.Family, name string, has func(table string) bool) string {
		switch {
		case has(nftTable):
			return fmt.Sprintf("add table %[1]s %[2]s\nadd chain %[1]s %[2]s prerouting { type nat hook prerouting priority -100; }\nadd rule %[1]s %[2]s prerouting ct state established accept\ndelete table %[1]s %[3]s\n", name, nftDrainTable, nftTable)
		case has(nftDrainTable) && !conntrack.AnyTranslated(family):
			return fmt.Sprintf("delete table %s %s\n", name, nftDrainTable)
		}
		return ""
	})
}

// cleanup removes the tables.
func (nftables) cleanup(ctx context.Context) error {
	return eachNFT(ctx, func(_ inet.Family, name string, has func(table string) bool) (script string) {
		for _, table := range []string{nftTable, nftDrainTable} {
			if has(table) {
				script += fmt.Sprintf("delete table %s %s\n", name, table)
			}
		}
		return script
	})
}

// eachNFT runs the script that a function returns for a family, given nft's name of the family and
// the tables that it has. Without nft on this host, nothing made any.
func eachNFT(ctx context.Context, script func(family inet.Family, name string, has func(table string) bool) string) error {
	nft, err := exec.LookPath("nft")
	if err != nil {
		return nil
	}
	var errs []error
	for family, name := range [inet.Families]string{"ip", "ip6"} {
		out, err := exec.CommandContext(ctx, nft, "list", "tables", name).CombinedOutput()
		if err != nil {
			errs = append(errs, fmt.Errorf("list nftables tables: %w: %s", err, bytes.TrimSpace(out)))
			continue
		}
		input := script(inet.Family(family), name, func(table string) bool {
			return strings.Contains(string(out)+"\n", "table "+name+" "+table+"\n")
		})
		if input == "" {
			continue
		}
		cmd := exec.CommandContext(ctx, nft, "-f", "-")
		cmd.Stdin = strings.NewReader(input)
		if out, err := cmd.CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("remove the tables of mode nftables: %w: %s", err, bytes.TrimSpace(out)))
			continue
		}
		klog.FromContext(ctx).Info("Removed tables of mode nftables", "family", name)
	}
	return errors.Join(errs...)
}
