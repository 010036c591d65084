// SPDX-License-Identifier: Apache-2.0

//go:build linux

package live_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// Play makes calls that pass, and others only if the tier serves them.
const script = `# Pods answer.
# Statements: S01

node node1
node node2
pod web node1
pod shell node2
client c

apply web.yaml
reach client c -> web:8080 : passes
reach pod shell -> web:8080 : passes
reach pod shell -> 10.96.0.10:80 : backends web source client

-- web.yaml --
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIPs: [10.96.0.10]
  ports: [{name: http, port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- {addresses: [10.244.1.1], nodeName: node1}
`

var bg = context.Background()

// bystander serves nothing, and records the rules of the nodes.
type bystander struct {
	t     *testing.T
	rules map[string]string // by node
}

func (b *bystander) Start(n *lab.Node) (proxier.Tier, func(), error) {
	out, err := n.Command(bg, "iptables-save").Output()
	b.rules[n.Name] = string(out)
	return nothing{}, func() {}, err
}

func (b *bystander) Serves(e *proxier.Explanation) error {
	if e.Outcome != proxier.Pass {
		return errors.New("not served")
	}
	return nil
}

type nothing struct{}

func (nothing) Sync(context.Context, proxier.Update) error          { return nil }
func (nothing) Cleanup(context.Context) error                       { return nil }
func (nothing) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

func TestPlay(t *testing.T) {
	s, err := scenarios.Parse("pods.txtar", []byte(script))
	if err != nil {
		t.Fatal(err)
	}
	if served, all := live.CountServed(t, s, &bystander{t: t}); served != 2 || all != 3 {
		t.Errorf("%d of %d calls are served, want 2 of 3", served, all)
	}
	if err := live.Guarded.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	for name, opts := range map[string][]lab.Options{"as it comes": nil, "guarded": {{Nodes: live.Guarded}}} {
		t.Run(name, func(t *testing.T) {
			b := &bystander{t: t, rules: map[string]string{}}
			live.Play(t, s, b, opts...)
			for _, node := range []string{"node1", "node2"} {
				if guarded := strings.Contains(b.rules[node], "FORWARD DROP"); guarded != (opts != nil) {
					t.Errorf("rules of %s:\n%s", node, b.rules[node])
				}
			}
		})
	}
}
