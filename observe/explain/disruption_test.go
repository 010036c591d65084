// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
)

func TestDisruptions(t *testing.T) {
	start := time.Unix(1700000000, 0)
	var l Disruptions
	name := func(port string, protocol proxier.Protocol) proxier.ServicePortName {
		return proxier.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "shop", Name: "web"}, Port: port, Protocol: protocol}
	}
	of := &Frontend{Namespace: "shop", Name: "web", Port: "http"}
	if notes := l.Notes(of, "TCP", start); len(notes)+len(l.Notes(nil, "TCP", start)) > 0 {
		t.Errorf("before the first: %q", notes)
	}
	for i := range keptDisruptions + 2 { // the first ones are forgotten
		l.Add(proxier.Disruption{Name: name("other", proxier.TCP), At: start.Add(time.Duration(i))})
	}
	l.Add(proxier.Disruption{Name: name("http", proxier.UDP), At: start})
	l.Add(proxier.Disruption{Name: name("http", proxier.TCP), Slots: 509, Moved: 0.123456, At: start})
	l.Add(proxier.Disruption{Name: name("http", proxier.TCP), Slots: 1021, Moved: 1, At: start.Add(time.Minute)})
	want := []string{
		"30s ago, a change of the Maglev table of set ipv4/cluster (1021 slots) moved 100.00 % of connections without state to other endpoints",
		"1m30s ago, a change of the Maglev table of set ipv4/cluster (509 slots) moved 12.35 % of connections without state to other endpoints",
	}
	if diff := cmp.Diff(want, l.Notes(of, "TCP", start.Add(90*time.Second))); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if n := len(l.Notes(&Frontend{Namespace: "shop", Name: "web", Port: "other"}, "TCP", start)); n != shownDisruptions {
		t.Errorf("%d notes, want %d", n, shownDisruptions)
	}
	if len(l.last) != keptDisruptions || !slices.ContainsFunc(l.last, func(d proxier.Disruption) bool { return d.Slots == 1021 }) {
		t.Errorf("%d are kept", len(l.last))
	}
}
