// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// Cleanup removes every chain of this mode, ours and upstream's, and the jumps to them.
// KUBE-FIREWALL stays: kubelet has one of that name. Connections that are translated
// already go on.
func Cleanup(ctx context.Context, tools Tools) error {
	var errs []error
	for family := range proxier.Families {
		if tools.Usable(ctx, family) != nil {
			continue // nothing can be there
		}
		if err := cleanupFamily(ctx, tools, family); err != nil {
			errs = append(errs, fmt.Errorf("remove %s rules: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// shared are the chains that are not of one service port.
var shared = []string{
	servicesChain, nodePortsChain, postroutingChain, markMasqChain, externalServicesChain, externalNodePortsChain,
	proxyFirewallChain, forwardChain, canaryChain,
}

// isOurs says whether a chain is of this mode.
func isOurs(chain string) bool {
	return isOwn(chain) || slices.ContainsFunc(shared, func(s string) bool {
		rest, ours := strings.CutPrefix(chain, s)
		return ours && (rest == "" || rest[0] == '-' && s != postroutingChain)
	})
}

func cleanupFamily(ctx context.Context, tools Tools, family proxier.Family) error {
	for _, name := range tableOrder {
		table, err := tools.Save(ctx, family, name)
		if err != nil {
			return err
		}
		t := newText()
		part := t.table(name)
		for _, c := range table.Chains {
			if isOurs(c.Name) {
				part.drop(c.Name)
				continue
			}
			for _, r := range c.Rules {
				if at := strings.LastIndex(r, "-j "); at >= 0 && isOurs(r[at+len("-j "):]) {
					part.lines = append(part.lines, "-D "+c.Name+" "+r)
				}
			}
		}
		if input := t.bytes(); len(input) > 0 {
			if err := tools.Restore(ctx, family, input); err != nil {
				return err
			}
		}
	}
	return nil
}
