// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

// flowTable has one conntrack entry in each family, of a removed UDP Service.
type flowTable struct{ left []proxier.Family }

var staleFlows = [proxier.Families]conntrack.Flow{
	{Protocol: proxier.UDP, Source: netip.MustParseAddrPort("10.244.1.9:4000"), Destination: netip.MustParseAddrPort("10.96.0.1:80"), Replies: netip.MustParseAddrPort("10.244.1.5:8080")},
	{Protocol: proxier.UDP, Source: netip.MustParseAddrPort("[fd00:10:244:1::9]:4000"), Destination: netip.MustParseAddrPort("[fd00:10:96::1]:80"), Replies: netip.MustParseAddrPort("[fd00:10:244:1::5]:8080")},
}

func (t *flowTable) Flows(_ context.Context, family proxier.Family) iter.Seq2[conntrack.Flow, error] {
	return func(yield func(conntrack.Flow, error) bool) {
		if slices.Contains(t.left, family) {
			yield(staleFlows[family], nil)
		}
	}
}

func (t *flowTable) Delete(_ context.Context, flows []conntrack.Flow) (int, error) {
	for _, f := range flows {
		t.left = slices.DeleteFunc(t.left, func(family proxier.Family) bool { return staleFlows[family] == f })
	}
	return len(flows), nil
}

// failingTools fail all restores of a family.
type failingTools struct {
	Tools
	family proxier.Family // Families: of none
}

func (t *failingTools) Restore(ctx context.Context, f proxier.Family, input []byte) error {
	if f == t.family {
		return errors.New("out of order")
	}
	return t.Tools.Restore(ctx, f, input)
}

// newFlowNode returns a node with a tier that has a fake conntrack table.
func newFlowNode(t *testing.T, tools Tools, policy proxier.Policy) (*node, *Tier, *flowTable) {
	n := unstartedNode(t, tools)
	tier, err := Open(t.Context(), n.options())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tier.Close() })
	flows := &flowTable{left: []proxier.Family{proxier.IPv4, proxier.IPv6}}
	tier.opts.Flows = staleudp.New(staleudp.Options{Table: flows})
	n.Start(tier, iptablestest.Facts, policy)
	n.OnServiceAdd(service(0, dualStack(0), func(s *v1.Service) { s.Spec.Ports[0].Protocol = v1.ProtocolUDP }))
	return n, tier, flows
}

// TestFlowsOfOneFamily: if rules of one family cannot be written, stale conntrack entries of the
// other family are deleted all the same. Those of the first are deleted after its rules are written.
func TestFlowsOfOneFamily(t *testing.T) {
	for family := range proxier.Families {
		t.Run(family.String(), func(t *testing.T) {
			tools := &failingTools{newSimulated(), proxier.Families}
			n, _, flows := newFlowNode(t, tools, proxier.Policy{})
			n.MustSync()
			tools.family = family
			flows.left = []proxier.Family{proxier.IPv4, proxier.IPv6}
			n.OnServiceDelete(service(0))
			if err := n.Sync(t.Context()); err == nil {
				t.Error("no error")
			}
			if want := []proxier.Family{family}; !slices.Equal(flows.left, want) {
				t.Errorf("conntrack entries of %v are left, want %v", flows.left, want)
			}
			tools.family = proxier.Families
			if err := n.Tier.Sync(t.Context(), proxier.Update{}); err != nil || len(flows.left) > 0 {
				t.Errorf("conntrack entries of %v are left, error %v", flows.left, err)
			}
		})
	}
}

// TestLoopbackClosed: if route_localnet cannot be set, that is reported once, and blocks nothing else.
// It is set as soon as possible.
func TestLoopbackClosed(t *testing.T) {
	n, tier, flows := newFlowNode(t, newSimulated(), proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}})
	dir := filepath.Join(t.TempDir(), "conf")
	tier.routeLocalnet = filepath.Join(dir, "route_localnet")
	n.MustSync()
	n.OnServiceDelete(service(0))
	n.MustSync()
	n.MustFullSync()
	if len(flows.left) > 0 {
		t.Errorf("conntrack entries of %v are left", flows.left)
	}
	if len(n.Problems) != 1 || n.Problems[0].Kind != "Node" {
		t.Errorf("reported %+v", n.Problems)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	n.MustSync()
	n.MustFullSync()
	if b, err := os.ReadFile(tier.routeLocalnet); fmt.Sprint(string(b), err) != "1<nil>" || len(n.Problems) != 1 {
		t.Errorf("%q, error %v, reported %+v", b, err, n.Problems)
	}
}
