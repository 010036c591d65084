// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/tandem-proxy/tandem/kernel/hostfilter"
)

// hostFilters reads them from the kernel, as kube-proxy does.
func hostFilters(ctx context.Context) []string {
	list := []string{}
	all, err := hostfilter.Read(ctx)
	for _, r := range all.BeforeDNAT {
		list = append(list, "before DNAT: "+r.String())
	}
	for _, f := range all.Firewalls {
		list = append(list, "forwards only translated connections: "+f.String())
	}
	if err != nil {
		list = append(list, "cannot read all: "+err.Error())
	}
	return list
}
