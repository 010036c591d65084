// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestCreateEstablished: entries that do not exist are created, as answered, and one that the kernel refuses stops no other.
func TestCreateEstablished(t *testing.T) {
	n := lab.NewT(t, lab.Options{}).Node("node1")
	const host = sysctl.Root("/")
	conntrack.Ready(t.Context(), host)
	if _, err := host.Get(netfilter + "nf_conntrack_max"); err != nil {
		lab.SkipOrFail(t, fmt.Errorf("the kernel's conntrack: %w", err))
	}
	flow := func(source, destination string) conntrack.Flow {
		s, d := netip.MustParseAddrPort(source), netip.MustParseAddrPort(destination)
		return conntrack.Flow{Protocol: inet.TCP, Source: s, Destination: d, Replies: d, Seen: s}
	}
	flows := []conntrack.Flow{
		flow("10.0.0.1:40000", "10.244.0.1:80"), flow("[fd00::1]:40000", "[fd00:244::1]:80"),
		flow("10.244.0.1:80", "10.0.0.1:40000"), // the first, from its other side
	}
	if err := n.Do(func() error {
		for _, want := range []int{2, 0} {
			if created, err := (conntrack.Kernel{}).CreateEstablished(t.Context(), host, flows); err != nil || created != want {
				t.Errorf("created %d, want %d, error %v", created, want, err)
			}
		}
		for _, want := range flows[:2] {
			got, err := conntrack.Kernel{}.Find(t.Context(), inet.TCP, want.Source, want.Destination)
			if want.ID, want.Answered = got.ID, true; err != nil || got != want {
				t.Errorf("found %s, answered: %v, error %v; want %s, answered", got, got.Answered, err, want)
			}
		}
		refused := flow("10.0.0.1:40001", "10.244.0.1:80")
		refused.Seen = netip.AddrPort{}
		list := []conntrack.Flow{refused, flow("10.0.0.1:40002", "10.244.0.1:80")}
		if created, err := (conntrack.Kernel{}).CreateEstablished(t.Context(), host, list); created != 1 || err == nil || !strings.Contains(err.Error(), ":40001") {
			t.Errorf("created %d, want 1, error %v", created, err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}
