// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"regexp"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/differential"
	"github.com/tandem-proxy/tandem/test/oracle"
)

// beside has upstream's rules beside ours.
type beside struct {
	*traced
	upstream *differential.Node
	last     *oracle.Cluster
}

func (b *beside) Check(c *oracle.Cluster, flow proxier.Flow, want *oracle.Answer) error {
	if err := b.traced.Check(c, flow, want); err != nil {
		return err
	}
	if b.last != c {
		// As a process that begins, which looks at all entries.
		all, conntrack := b.all(), differential.NewConntrack()
		conntrack.Observe(&all)
		if err := b.upstream.CheckConntrack(c, conntrack); err != nil {
			return err
		}
		b.last = c
	}
	return b.upstream.Check(c, flow, want)
}

// TestDifferential: upstream's iptables proxier does with packets what the table, the oracle and
// the rules of this package do, but for what differential lists. For a night of it:
//
//	UPSTREAM_TRACER=$(hack/upstream.sh -tracer) \
//		go test ./proxier/iptables -run=TestDifferential$ -timeout=0 -oracle.flows=1000000000
func TestDifferential(t *testing.T) {
	upstream := differential.StartT(t)
	defer upstream.LogCounts(t)
	besideWorlds(upstream).Run(t)
}

func besideWorlds(upstream *differential.Upstream) oracle.Worlds {
	return oracle.Worlds{
		Share: 10, Steps: 15, Flows: 60, Events: oracle.Admitted,
		Tier: func(seed uint64) oracle.Tier {
			return &beside{traced: newTraced(seed, nil), upstream: upstream.Node()}
		},
	}
}

// TestDifferentialFinds: it notices rules of upstream's that say something else.
func TestDifferentialFinds(t *testing.T) {
	upstream := differential.StartT(t)
	for _, spoiled := range []struct{ name, rules, become string }{
		{"no masquerading of ClusterIPs", "-A KUBE-SV[CL]-.* -j KUBE-MARK-MASQ\n", ""},
		{"no masquerading of who dials itself", "-A KUBE-SEP-.* -j KUBE-MARK-MASQ\n", ""},
		{"local endpoints for all", "-j KUBE-SVL-", "-j KUBE-SVC-"},
		{"source ranges ignored", "(-A KUBE-FW-[A-Z0-9]+ .*) -s [^ ]+", "$1"},
		{"reject instead of drop", "(KUBE-(?:EXTERNAL-)?SERVICES .*) -j DROP", "$1 -j REJECT"},
		{"silence about ClusterIPs without endpoints", "-A KUBE-SERVICES .* -j REJECT\n", ""},
		{"other shares", "--probability 0.5", "--probability 0.4"},
		{"affinity without a memory", "-m recent --name [^ ]+ --set ", ""},
		{"affinity for a shorter time", "--seconds [0-9]+ --reap", "--seconds 1 --reap"},
		{"NodePorts everywhere", "-m addrtype --dst-type LOCAL -j KUBE-NODEPORTS", "-j KUBE-NODEPORTS"},
	} {
		t.Run(spoiled.name, func(t *testing.T) {
			rules, changed := regexp.MustCompile(spoiled.rules), 0
			upstream.Spoil = func(text string) string {
				changed += len(rules.FindAllString(text, -1))
				return rules.ReplaceAllString(text, spoiled.become)
			}
			err := besideWorlds(upstream).Find(200)
			if err == nil || !strings.Contains(err.Error(), "tier: ") {
				t.Errorf("%d rules changed, and %v", changed, err)
			}
		})
	}
}

// TestCases plays the stories of package differential on rules; in short mode those of IPv4.
func TestCases(t *testing.T) {
	stories, err := differential.Stories()
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range stories {
		if testing.Short() && strings.Contains(s.Name, "/IPv6/") {
			continue
		}
		t.Run(s.Name, func(t *testing.T) { s.Play(t, differential.Beside{Tier: newTraced(uint64(i), nil)}) })
	}
}
