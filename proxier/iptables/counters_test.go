// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables/iptablestest"
)

// TestNoCounters: if a kernel lacks counters, or the match that uses them, rules are written
// without them, and Counted reports that it has no numbers.
func TestNoCounters(t *testing.T) {
	for name, tc := range map[string]struct {
		refuse func(input string) error
		lack   func(*Options)
	}{
		"no object": {lack: func(o *Options) { o.Counters = noCounters{o.Counters} }},
		"no match": {refuse: func(input string) error {
			if strings.Contains(input, "nfacct") {
				return errors.New("no such match")
			}
			return nil
		}},
		"not wanted": {lack: func(o *Options) { o.Counters = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			n := unstartedNode(t, newSimulated())
			n.Tools.Before = tc.refuse
			opts := n.options()
			opts.Flows = nil // the simulated kernel has no flows
			if tc.lack != nil {
				tc.lack(&opts)
			}
			tier, err := Open(t.Context(), opts)
			if err != nil {
				t.Fatal(err)
			}
			defer tier.Close()
			if c, ok, err := tier.Counted(); ok || err != nil {
				t.Errorf("counted %+v, %v", c, err)
			}
			n.Start(simulatedTierOf(tier), iptablestest.Facts, proxier.Policy{NodePorts: proxier.NodePortSelector{Loopback: true}})
			n.OnServiceAdd(service(0, nodePort(30080)))
			n.OnEndpointSliceAdd(endpoints(0, "10.244.1.5"))
			n.MustSync()
			for f := range proxier.Families {
				text := saved(t, n.Tools, f)
				if strings.Contains(text, "nfacct") || !strings.Contains(text, "--ctstate INVALID -j DROP") {
					t.Errorf("%s:\n%s", f, text)
				}
			}
		})
	}
}

// noCounters are the counters of a kernel that does not support any.
type noCounters struct{ Counters }

func (noCounters) Ensure(string) error { return nfacct.ErrNotSupported }

// simulatedTierOf writes the rules that a Tier would, without changing the settings of this host.
func simulatedTierOf(t *Tier) *simulatedTier { return &simulatedTier{t.opts, t.rules} }

// TestCountersComeBack: a full sync restores counters that another program deleted together with
// the rules. The kernel would refuse rules whose counters do not exist.
func TestCountersComeBack(t *testing.T) {
	fake := newSimulated()
	n := newNode(t, fake)
	n.Serve(0, 3, 2)
	n.MustSync()
	before := saved(t, n.Tools, proxier.IPv4)
	for f := range proxier.Families {
		n.Restore(f, "*filter\n-F KUBE-FORWARD\nCOMMIT\n*nat\n-F KUBE-MARK-MASQ\nCOMMIT\n")
	}
	for _, name := range counterNames {
		if err := fake.Delete(name); err != nil {
			t.Fatal(err)
		}
	}
	n.MustFullSync()
	if after := saved(t, n.Tools, proxier.IPv4); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
}
