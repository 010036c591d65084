// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

var variants = []xtables.Variant{xtables.NFT, xtables.Legacy}

// Builders of objects, and views of rules.
var (
	service, endpoints, pod, kindOf            = iptablestest.Service, iptablestest.Endpoints, iptablestest.Pod, iptablestest.KindOf
	dualStack, balanced, nodePort, healthCheck = iptablestest.DualStack, iptablestest.Balanced, iptablestest.NodePort, iptablestest.HealthCheck
	externalLocal, internalLocal, sticky       = iptablestest.ExternalLocal, iptablestest.InternalLocal, iptablestest.Sticky
	contents, saved, entries                   = iptablestest.Contents, iptablestest.Saved, iptablestest.Entries
	newSimulated                               = iptablestest.NewSimulated
)

// simulatedTier is the part of a Tier that writes rules, without the kernel's settings.
type simulatedTier struct {
	opts Options
	*writer
}

func newSimulatedTier(opts Options) *simulatedTier {
	t := &simulatedTier{opts: opts}
	t.writer = newWriter(&t.opts, func(proxier.Family) bool { return true })
	for _, f := range t.families {
		f.counts = opts.Counters != nil
	}
	return t
}

func (t *simulatedTier) Sync(ctx context.Context, u proxier.Update) error {
	errs := t.write(ctx, u)
	return errors.Join(errs[:]...)
}

func (t *simulatedTier) Cleanup(ctx context.Context) error { return Cleanup(ctx, t.opts.Tools, false) }

func (t *simulatedTier) Supports(_ *proxier.Decision, _ *proxier.Frontend) error { return nil }

// node is a node with simulated tools.
type node struct{ *iptablestest.Node }

// newNode starts a process that knows no objects yet.
func newNode(t *testing.T, tools Tools) *node {
	t.Helper()
	n := unstartedNode(t, tools)
	n.restart()
	return n
}

func unstartedNode(t *testing.T, tools Tools) *node { return &node{iptablestest.NewNode(t, tools)} }

func (n *node) options() Options {
	counters, _ := n.Tools.Tools.(Counters)
	return Options{Tools: n.Tools, Counters: counters, Flows: staleudp.New(staleudp.Options{Table: conntrack.Kernel{}}), Reporter: n.Reporter()}
}

// restart starts another process, which knows no objects.
func (n *node) restart() {
	n.Start(newSimulatedTier(n.options()), iptablestest.Facts, proxier.Policy{})
}
