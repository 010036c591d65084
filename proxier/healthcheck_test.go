// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
)

// healthChecks writes down what syncs tell of health checks.
type healthChecks struct{ strings.Builder }

func (*healthChecks) Queued(time.Time) {}

func (h *healthChecks) Synced(info SyncInfo) {
	for _, c := range info.HealthChecks {
		if c.Check == nil {
			fmt.Fprintf(h, "%s none\n", c.Service)
			continue
		}
		fmt.Fprintf(h, "%s port %d ready %v\n", c.Service, c.Check.Port, c.Check.Ready)
	}
}

// TestHealthCheckChanges: observers are told of each change once, also when the tier fails.
func TestHealthCheckChanges(t *testing.T) {
	told, tier := &healthChecks{}, &failingTier{}
	p, err := New(Options{NodeName: "node1", Tier: tier, Observer: told, Runner: RunnerOptions{Clock: clocktesting.NewFakeClock(time.Unix(1700000000, 0))}})
	if err != nil {
		t.Fatal(err)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	sync := func(want string) {
		t.Helper()
		_ = p.Sync(context.Background())
		if got := told.String(); got != want {
			t.Errorf("told %q, want %q", got, want)
		}
		told.Reset()
	}
	checked := makeService("a", clusterIPs("10.96.0.1", "fd00:10:96::1"), func(s *v1.Service) {
		s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = v1.ServiceTypeLoadBalancer, v1.ServiceExternalTrafficPolicyLocal, 32000
	})
	p.OnServiceAdd(checked)
	p.OnServiceAdd(makeService("b"))
	tier.err = errors.New("failed")
	sync("ns/a port 32000 ready [0 0]\n")
	tier.err = nil
	sync("")
	slice := makeSlice("a-1", "10.244.0.1 node=node1", "10.244.0.2 node=node2")
	p.OnEndpointSliceAdd(slice)
	sync("ns/a port 32000 ready [1 0]\n")
	p.OnEndpointSliceUpdate(slice, makeSlice("a-1", "10.244.0.1 node=node1", "10.244.0.3 node=node2"))
	sync("")
	p.OnServiceDelete(checked)
	p.OnServiceAdd(checked)
	sync("")
	cluster := checked.DeepCopy()
	cluster.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
	p.OnServiceUpdate(checked, cluster)
	sync("ns/a none\n")
}

func TestHealthCheckAddrs(t *testing.T) {
	facts := Facts{NodeIPs: [Families]netip.Addr{IPv4: netip.MustParseAddr("172.18.0.1")}}
	for _, a := range []string{"10.0.0.1", "127.0.0.1", "172.18.0.1", "::1", "fd00:172:18::1", "fe80::1"} {
		facts.LocalAddrs = append(facts.LocalAddrs, netip.MustParseAddr(a))
	}
	for _, tt := range []struct {
		list     []string
		loopback bool
		want     string
	}{
		{nil, true, "[0.0.0.0] [::]"},
		{[]string{"primary"}, true, "[172.18.0.1] []"},
		{[]string{"10.0.0.0/8", "::/0"}, false, "[10.0.0.1] [::]"},
		{[]string{"172.0.0.0/8", "fd00::/8", "fe80::/10"}, false, "[172.18.0.1] [fd00:172:18::1]"},
		{[]string{"127.0.0.0/8", "::1/128"}, true, "[127.0.0.1] [::1]"},
		{[]string{"127.0.0.0/8"}, false, "[127.0.0.1] [::]"},
		{[]string{"127.0.0.0/8", "::1/128"}, false, "[127.0.0.1] [::1]"},
		{[]string{"localhost", "primary"}, false, "[127.0.0.1 172.18.0.1] [::1]"},
	} {
		selector, _, err := ParseNodePortSelector(tt.list, tt.loopback)
		if err != nil {
			t.Fatal(err)
		}
		policy := Policy{NodePorts: selector}
		rules := policy.NodeRules(&facts)
		if got := fmt.Sprint(rules.HealthCheckAddrs[IPv4], rules.HealthCheckAddrs[IPv6]); got != tt.want {
			t.Errorf("nodePortAddresses %v: %s, want %s", tt.list, got, tt.want)
		}
	}
}

// failingTier fails when it is told to.
type failingTier struct {
	Tier
	err error
}

func (f *failingTier) Sync(context.Context, Update) error { return f.err }

// TestRecreatedService: a Service that is deleted and made anew within a second, all else
// alike, has another UID, by which kubectl finds its Events.
func TestRecreatedService(t *testing.T) {
	tracker, table := NewChangeTracker("node1", time.Time{}, nil), NewTable(Facts{}, Policy{})
	web := makeService("web", func(s *v1.Service) {
		s.UID = "one"
		s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = v1.ServiceTypeLoadBalancer, v1.ServiceExternalTrafficPolicyLocal, 32000
	})
	tracker.UpdateService(web)
	table.Apply(tracker.Take())
	tracker.DeleteService(types.NamespacedName{Namespace: web.Namespace, Name: web.Name})
	again := web.DeepCopy()
	again.UID = "two"
	tracker.UpdateService(again)
	changes := table.Apply(tracker.Take())
	if len(changes) != 1 || changes[0].New.UID != "two" {
		t.Errorf("changes %v", changes)
	}
	for _, h := range table.HealthChecks() {
		if h.UID != "two" {
			t.Errorf("the health check is that of UID %s", h.UID)
		}
	}
}
