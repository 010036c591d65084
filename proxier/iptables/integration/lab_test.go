// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"os"
	"sync"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

var variants = []xtables.Variant{xtables.NFT, xtables.Legacy}

// Builders of objects, and views of rules.
var (
	service, endpoints, pod, kindOf = iptablestest.Service, iptablestest.Endpoints, iptablestest.Pod, iptablestest.KindOf
	dualStack, balanced, nodePort   = iptablestest.DualStack, iptablestest.Balanced, iptablestest.NodePort
	externalLocal, internalLocal    = iptablestest.ExternalLocal, iptablestest.InternalLocal
	sticky, healthCheck             = iptablestest.Sticky, iptablestest.HealthCheck
	contents, saved, chainName      = iptablestest.Contents, iptablestest.Saved, iptablestest.ChainName
)

// labTools run the programs in the network namespace of a node.
type labTools struct {
	mu    sync.Mutex
	reads int // calls of SaveAll
	*xtables.Tools
	at *lab.Node
}

func newLabTools(t *testing.T, v xtables.Variant) *labTools {
	t.Helper()
	tools, err := xtables.New(v)
	if err != nil {
		lab.SkipOrFail(t, err)
	}
	return &labTools{Tools: tools, at: lab.NewT(t).Node("node1")}
}

func (l *labTools) Restore(ctx context.Context, f proxier.Family, input []byte) error {
	return l.at.Do(func() error { return l.Tools.Restore(ctx, f, input) })
}

func (l *labTools) Save(ctx context.Context, f proxier.Family, table string) (saved *xtables.Table, err error) {
	err = l.at.Do(func() error {
		saved, err = l.Tools.Save(ctx, f, table)
		return err
	})
	return saved, err
}

func (l *labTools) SaveAll(ctx context.Context, f proxier.Family, tables ...string) (saved map[string]*xtables.Table, err error) {
	l.mu.Lock()
	l.reads++
	l.mu.Unlock()
	err = l.at.Do(func() error {
		saved, err = l.Tools.SaveAll(ctx, f, tables...)
		return err
	})
	return saved, err
}

// readsNow is the number of reads while a process runs.
func (l *labTools) readsNow() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reads
}

func (l *labTools) Sizes(f proxier.Family, tables ...string) (text string, ok bool, err error) {
	err = l.at.Do(func() error {
		text, ok, err = l.Tools.Sizes(f, tables...)
		return err
	})
	return text, ok, err
}

func (l *labTools) Uses(f proxier.Family, chains ...xtables.ChainName) (text string, ok bool, err error) {
	err = l.at.Do(func() error {
		text, ok, err = l.Tools.Uses(f, chains...)
		return err
	})
	return text, ok, err
}

func (l *labTools) Usable(ctx context.Context, f proxier.Family) error {
	return l.at.Do(func() error { return l.Tools.Usable(ctx, f) })
}

// Ensure, Packets and Delete implement iptables.Counters.
func (l *labTools) Ensure(name string) error {
	return l.at.Do(func() error { return nfacct.Kernel{}.Ensure(name) })
}

func (l *labTools) Packets(name string) (n uint64, err error) {
	err = l.at.Do(func() error {
		n, err = nfacct.Kernel{}.Packets(name)
		return err
	})
	return n, err
}

func (l *labTools) Delete(name string) error {
	return l.at.Do(func() error { return nfacct.Kernel{}.Delete(name) })
}

// node is a lab node whose rules a tier writes.
type node struct {
	*iptablestest.Node
	t  *testing.T
	at *lab.Node
	// repaired is iptables.Options.Repaired of processes that begin.
	repaired func(proxier.Repair)
}

func newNode(t *testing.T, v xtables.Variant) (*node, *labTools) {
	t.Helper()
	tools := newLabTools(t, v)
	return &node{Node: iptablestest.NewNode(t, tools), t: t, at: tools.at}, tools
}

// newSimulatedNode returns a node with simulated tools, and the settings of a lab node.
func newSimulatedNode(t *testing.T, at *lab.Node) *node {
	return &node{Node: iptablestest.NewNode(t, iptablestest.NewSimulated()), t: t, at: at}
}

// open starts a process that knows no objects yet.
func (n *node) open(facts proxier.Facts, policy proxier.Policy) *iptables.Tier {
	n.t.Helper()
	opts := iptables.Options{Tools: n.Tools, Reporter: n.Reporter(), Repaired: n.repaired}
	opts.Counters, _ = n.Tools.Tools.(iptables.Counters)
	opts.Flows = staleudp.New(staleudp.Options{Table: conntrack.Kernel{}})
	var tier *iptables.Tier
	err := n.at.Do(func() (err error) {
		tier, err = iptables.Open(n.t.Context(), opts)
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = tier.Close() })
	n.Tools.Take() // inputs of the probes
	n.Start(tier, facts, policy)
	return tier
}
